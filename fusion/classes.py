"""Networks of different classes: the rows of their last layers by class name, so that all of them answer for all classes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.matching import wired
from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.probe import BATCH
from fedloom.fusion.state import State

UNKNOWN = -20.0  # the logarithm of the chance, at most, that a network gives a class that it does not know


def united(classes: Sequence[Sequence[str]], first: int) -> tuple[str, ...]:
    """The names of all classes, those of one network first."""
    own = classes[first] if 0 <= first < len(classes) else ()
    return tuple(dict.fromkeys([*own, *(name for names in classes for name in names)]))


def in_classes(
    networks: Sequence[nn.Module], classes: Sequence[Sequence[str]], wanted: Sequence[str], probe: Tensor
) -> list[nn.Module]:
    """Networks that answer for the wanted classes, in that order; for those that they do not know, never.

    classes: the names of each network's outputs. Raises UserError, naming the network, for names that are not one for each
    output, and for a last layer without bias where a class is unknown.
    """
    if len(classes) != len(networks):
        raise UserError(f"fuse: classes of {len(classes)} networks for {len(networks)}; takes the names of each's outputs")
    if not all(isinstance(names, Sequence) for names in classes):
        raise UserError("fuse: classes: takes for each network a list of names, in the order of its outputs")
    pairs = zip(networks, wired(networks, probe), classes, strict=True)
    return [_reordered(place, *pair, wanted, probe) for place, pair in enumerate(pairs)]


def _reordered(
    place: int, network: nn.Module, wiring: Wiring, own: Sequence[str], wanted: Sequence[str], probe: Tensor
) -> nn.Module:
    outputs = wiring.axes[wiring.layers[-1].outputs]
    if len(own) != outputs.size or len(set(own)) != len(own):
        raise UserError(f"network {place}: {len(own)} class names, {len(set(own))} different, for {outputs.size} outputs; "
                        "takes one name for each, all different")  # fmt: skip
    if tuple(own) == tuple(wanted):
        return network
    state, new, unknown = network.state_dict(), {}, [name for name in wanted if name not in own]
    never = _least(wiring, probe) + UNKNOWN if unknown else 0.0
    for slot in outputs.slots:
        if slot.repeat != 1 or slot.dim != 0:
            raise UserError(f"network {place}: its outputs are not the rows of '{slot.tensor}': they cannot be put in order")
        new[slot.tensor] = _rows(state[slot.tensor], own, wanted, never)
    if unknown and not any(tensor.ndim == 1 for tensor in new.values()):
        raise UserError(f"network {place}: its last layer has no bias, by which it would never answer '{unknown[0]}'")
    whole: State = {**state, **new}
    return with_state(network, whole)


@torch.no_grad()
def _least(wiring: Wiring, probe: Tensor) -> float:
    """The smallest over the probe set of the logarithm of the sum of exp(logits)."""
    with evaluating(wiring.graph):
        return min(float(wiring.graph(batch.clone()).flatten(1).logsumexp(dim=1).min()) for batch in probe.split(BATCH))


def _rows(tensor: Tensor, own: Sequence[str], wanted: Sequence[str], never: float) -> Tensor:
    known = {name: tensor[place] for place, name in enumerate(own)}
    missing = torch.full_like(tensor[0], never if tensor.ndim == 1 else 0.0)
    return torch.stack([known.get(name, missing) for name in wanted])
