"""InCo Aggregation (Chan et al. 2023): deep layers, which few sites have, learn from an earlier layer of the same shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.state import State
from fedloom.fusion.submodels import mean_over_holders
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import reference_of, wiring_of
from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.in_parts import InParts


@STRATEGIES.register("inco")
@dataclass(frozen=True)
class InCo(InParts):
    """Average over the holders of each layer, and correct the updates of layers that some architecture lacks (Sec. 4).

    The corrected update is (g0 / |g0| + gk / |gk|) (|g0| + |gk|) / 2. g0 is the update of the stage's first layer of the
    same shape. gk is the layer's own update, without its component against g0.
    """

    def fused(self, view: View) -> State:
        held, before = self.held(view), self.before(view)
        mean = mean_over_holders(held, before)
        lacking = {name for part in held for name in part.submodel.neutral}
        wiring = wiring_of(reference_of(view.experiment, self.reference).architecture)
        new = dict(mean)
        for first, later in _same_shape(wiring, mean):
            if later in lacking or any(later not in _held_names(part.submodel.places) for part in held):
                new[later] = before[later] + _crossed(mean[first] - before[first], mean[later] - before[later])
        return new


def _held_names(places: Mapping[str, tuple[str, object]]) -> set[str]:
    return {name for name, _ in places.values()}


def _same_shape(wiring: Wiring, state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of weight names with one stage and one shape: the first layer, and each later one."""
    first: dict[tuple[object, ...], str] = {}
    for unit in wiring.units:
        for layer in unit.layers:
            name = f"{layer}.weight"
            if name in state and state[name].ndim > 1:
                key = unit.group, tuple(state[name].shape)
                if first.setdefault(key, name) != name:
                    yield first[key], name


def _crossed(first: Tensor, own: Tensor) -> Tensor:
    """Return a layer's update, combined with the update of the first layer of its shape."""
    agree, length = (first * own).sum(), first.square().sum()
    if float(agree) < 0.0:
        own = own - agree / length * first
    sizes = first.norm(), own.norm()
    if not float(sizes[0]) or not float(sizes[1]):
        return own
    return (first / sizes[0] + own / sizes[1]) * (sizes[0] + sizes[1]) / 2
