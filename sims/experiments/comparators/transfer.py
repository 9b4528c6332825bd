"""Heterogeneous model transfer (Wang et al. 2021): copy a network's layers into a trained one of another depth.

The chain is the path from input to output with the most weighted layers; in a residual network it follows the
branches, not the shortcuts. Layers without a pair stay unchanged. As an alternative, cross-layer alignment pairs the
layers (CLA+OT, Sec. 4.1.1).
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.balance import outside_units
from fedloom.fusion.cla_ot.matching import layer_costs, match_units, wired
from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.graph.resize import with_state

Names = list[tuple[str, str]]  # layers of the target and the source


def transferred(source: nn.Module, target: nn.Module, probe: Tensor, by: str = "chain") -> nn.Module:
    """Return a copy of `target` with the weights of the paired layers of `source`.

    `probe`: inputs, [k, ...]. `by`: "chain" (the longest chain), or "cla" (all layers of units that correspond by
    CKA). Raise UserError if `by` is unknown, the networks have different families ("cla"), or paired layers have
    different shapes.
    """
    if by not in PAIRINGS:
        raise UserError(f"transfer: got by='{by}', takes one of: {', '.join(PAIRINGS)}")
    own, source_state = target.state_dict(), source.state_dict()
    state = dict(own)
    for name, other in PAIRINGS[by](source, target, probe):
        for tensor in target.get_submodule(name).state_dict():
            ours, theirs = f"{name}.{tensor}", f"{other}.{tensor}"
            if theirs not in source_state or source_state[theirs].shape != own[ours].shape:
                shapes = [
                    list(state[key].shape) if key in state else None for key, state in ((ours, own), (theirs, source_state))
                ]
                raise UserError(f"transfer: '{ours}' and '{theirs}' have shapes {shapes}; use networks of equal widths")
            state[ours] = source_state[theirs]
    return with_state(target, {name: tensor.clone() for name, tensor in state.items()})


def by_chain(source: nn.Module, target: nn.Module, probe: Tensor) -> Names:
    """Return pairs (target's layer, source's layer): a longest common sequence of the two chains, by type and shape.

    Of several, it is the one that comes first in the target.
    """
    wirings = wired([target, source], probe)
    ours, theirs = (chain(wiring) for wiring in wirings)
    kinds = [[_kind(network, name) for name in names] for network, names in ((target, ours), (source, theirs))]
    return [(ours[i], theirs[j]) for i, j in common(*kinds)]


def by_alignment(source: nn.Module, target: nn.Module, probe: Tensor) -> Names:
    """Return pairs (target's layer, source's) in units that correspond (CLA+OT, Algorithm 1), and outside of units."""
    ours, theirs = wired([target, source], probe)
    matches = match_units(ours, theirs, layer_costs(target, source, probe))
    groups = [(ours.units[i].layers, theirs.units[j].layers) for i, j in sorted(matches.items())]
    groups.append((outside_units(ours), outside_units(theirs)))
    return [pair for group in groups for pair in zip(*group, strict=True)]


PAIRINGS: dict[str, Callable[[nn.Module, nn.Module, Tensor], Names]] = {"chain": by_chain, "cla": by_alignment}


def chain(wiring: Wiring) -> list[str]:
    """Return the names of the layers, including norms, on the path with the most convolutions and linear layers."""
    layers = {layer.node: layer for layer in wiring.layers}
    best: dict[str, tuple[int, list[str]]] = {}
    for node in wiring.graph.graph.nodes:
        length, path = max((best[each.name] for each in node.all_input_nodes), key=lambda item: item[0], default=(0, []))
        if layer := layers.get(node.name):
            length, path = length + (layer.kind != "norm"), [*path, layer.name]
        best[node.name] = length, path
    return max(best.values(), key=lambda item: item[0])[1]


def common(ones: Sequence[object], twos: Sequence[object]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence, as early as possible in both."""
    most = [[0] * (len(twos) + 1) for _ in range(len(ones) + 1)]  # length for the rest from i and j
    for i in reversed(range(len(ones))):
        for j in reversed(range(len(twos))):
            most[i][j] = 1 + most[i + 1][j + 1] if ones[i] == twos[j] else max(most[i + 1][j], most[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(ones) and j < len(twos):
        if ones[i] == twos[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif most[i][j + 1] >= most[i + 1][j]:
            j += 1
        else:
            i += 1
    return pairs


def _kind(network: nn.Module, name: str) -> tuple[object, ...]:
    module = network.get_submodule(name)
    return type(module), *((key, tuple(tensor.shape)) for key, tensor in module.state_dict().items())
