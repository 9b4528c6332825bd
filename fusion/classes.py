"""Networks of different classes: extend and reorder their last layers, so that all answer for all classes."""

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

UNKNOWN = -20.0  # log probability, at most, that a network gives to a class it does not know


def united(classes: Sequence[Sequence[str]], first: int) -> tuple[str, ...]:
    """Return all networks' class names without repetition, those of network `first` first."""
    own = classes[first] if 0 <= first < len(classes) else ()
    return tuple(dict.fromkeys([*own, *(name for names in classes for name in names)]))


def in_classes(
    networks: Sequence[nn.Module], classes: Sequence[Sequence[str]], wanted: Sequence[str], probe: Tensor
) -> list[nn.Module]:
    """Return the networks with outputs for the wanted classes, in that order. None predicts a class that it lacks.

    `classes`: the names of each network's outputs. Raise UserError if a network does not have one name for each
    output, or lacks a class and has no bias in its last layer.
    """
    if len(classes) != len(networks):
        raise UserError(
            f"fuse: classes of {len(classes)} networks for {len(networks)}; use one list of output names for each"
        )
    if not all(isinstance(names, Sequence) for names in classes):
        raise UserError("fuse: classes: use a list of names for each network, in the order of its outputs")
    pairs = zip(networks, wired(networks, probe), classes, strict=True)
    return [_reordered(index, *pair, wanted, probe) for index, pair in enumerate(pairs)]


def _reordered(
    index: int, network: nn.Module, wiring: Wiring, own: Sequence[str], wanted: Sequence[str], probe: Tensor
) -> nn.Module:
    outputs = wiring.axes[wiring.layers[-1].outputs]
    if len(own) != outputs.size or len(set(own)) != len(own):
        raise UserError(f"network {index}: {len(own)} class names, {len(set(own))} different, for {outputs.size} outputs; "
                        "use a different name for each output")  # fmt: skip
    if tuple(own) == tuple(wanted):
        return network
    state, new, unknown = network.state_dict(), {}, [name for name in wanted if name not in own]
    never = _least(wiring, probe) + UNKNOWN if unknown else 0.0
    for slot in outputs.slots:
        if slot.repeat != 1 or slot.dim != 0:
            raise UserError(f"network {index}: its outputs are not the rows of '{slot.tensor}', so they cannot be reordered")
        new[slot.tensor] = _rows(state[slot.tensor], own, wanted, never)
    if unknown and not any(tensor.ndim == 1 for tensor in new.values()):
        raise UserError(f"network {index}: its last layer needs a bias, so that it never answers '{unknown[0]}'")
    extended: State = {**state, **new}
    return with_state(network, extended)


@torch.no_grad()
def _least(wiring: Wiring, probe: Tensor) -> float:
    """Return the smallest logsumexp of the logits over the probe set."""
    with evaluating(wiring.graph):
        return min(float(wiring.graph(batch.clone()).flatten(1).logsumexp(dim=1).min()) for batch in probe.split(BATCH))


def _rows(tensor: Tensor, own: Sequence[str], wanted: Sequence[str], never: float) -> Tensor:
    known = {name: tensor[index] for index, name in enumerate(own)}
    missing = torch.full_like(tensor[0], never if tensor.ndim == 1 else 0.0)
    return torch.stack([known.get(name, missing) for name in wanted])
