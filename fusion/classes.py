"""Networks of different classes: the rows of their last layers by class name, so that all of them answer for all classes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from conf.errors import UserError
from fusion.cla_ot.matching import wired
from fusion.exact import State
from fusion.graph.channels import Wiring
from fusion.graph.resize import with_state

UNKNOWN = -20.0  # the answer for a class that a network does not know: a chance of about e^-20


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
    pairs = zip(networks, wired(networks, probe), classes, strict=True)
    return [_reordered(place, *pair, wanted) for place, pair in enumerate(pairs)]


def _reordered(place: int, network: nn.Module, wiring: Wiring, own: Sequence[str], wanted: Sequence[str]) -> nn.Module:
    outputs = wiring.axes[wiring.layers[-1].outputs]
    if len(own) != outputs.size or len(set(own)) != len(own):
        raise UserError(f"network {place}: {len(own)} class names, {len(set(own))} different, for {outputs.size} outputs; "
                        "takes one name for each, all different")  # fmt: skip
    if tuple(own) == tuple(wanted):
        return network
    state, new = network.state_dict(), {}
    for slot in outputs.slots:
        if slot.repeat != 1 or slot.dim != 0:
            raise UserError(f"network {place}: its outputs are not the rows of '{slot.tensor}': they cannot be put in order")
        new[slot.tensor] = _rows(state[slot.tensor], own, wanted)
    unknown = [name for name in wanted if name not in own]
    if unknown and not any(tensor.ndim == 1 for tensor in new.values()):
        raise UserError(f"network {place}: its last layer has no bias, by which it would never answer '{unknown[0]}'")
    whole: State = {**state, **new}
    return with_state(network, whole)


def _rows(tensor: Tensor, own: Sequence[str], wanted: Sequence[str]) -> Tensor:
    known = {name: tensor[place] for place, name in enumerate(own)}
    missing = torch.full_like(tensor[0], UNKNOWN if tensor.ndim == 1 else 0.0)
    return torch.stack([known.get(name, missing) for name in wanted])
