"""Bring networks to one depth (CLA+OT, Sec. 3.2): add layers to the shallower one, or merge layers of the deeper one.

The result has the structure of the target and the widths of the changed network. Added layers are identities. Added
blocks are zero next to their identity skip. Outputs stay unchanged if a skip carries the layer's input, or the input
is not negative (after a ReLU).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.layers import check_design, identity, other_design, tensors_of, with_bias
from fedloom.fusion.graph.channels import Layer, Unit, Wiring
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.state import State

BALANCED = ("conv", "linear", "depthwise", "embedding", "norm")  # layers that networks of different depths can have
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Source:
    """The node of the network before balancing that a node's values come from. `rectified`: they pass a ReLU."""

    node: str
    rectified: bool = False


@dataclass(frozen=True, eq=False)
class Balanced:
    """A network after its layers have become those of the target.

    Attributes:
        network: The network.
        complete: The same network with all norms, for wiring.
        added: The tensors of layers that it did not have.
        origins: The previous names of its other layers, by their names now.
        sources: For its pre-activations, those of the network before balancing.
        stale: Whether `sources` are outdated, because layers were merged or removed.
        notes: What a user should know.
    """

    network: nn.Module
    complete: nn.Module
    added: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    stale: bool = False
    notes: tuple[str, ...] = ()


def unchanged(network: nn.Module, wiring: Wiring) -> Balanced:
    """Return the network as a `Balanced` without changes, because it has the target depth."""
    layers = {layer.name: layer.name for layer in wiring.layers}
    nodes = {node for nodes in wiring.points.values() for node in nodes} | set(_nodes(wiring, tuple(layers), None))
    sources = {node: Source(node) for node in nodes | {unit.sum for unit in wiring.units if unit.sum}}
    return Balanced(network, network, origins=layers, sources=sources)


def balanced(
    target: nn.Module,
    structure: Wiring,
    network: nn.Module,
    wiring: Wiring,
    matches: Mapping[int, int],
    signs: Mapping[str, Tensor] | None = None,
    inner: str = "own",
) -> Balanced:
    """Return a network with the layers of another one.

    Units of `target` without a match are added. Units of `network` without a match are merged (linear layers) or removed
    (residual blocks).

    Args:
        target: The network that sets the layers.
        structure: The wiring of `target`.
        network: The network to change.
        wiring: The wiring of `network`.
        matches: By unit of `target`, its match in `network` (matching.match_units).
        signs: For each merged unit's node, the diagonal D that replaces its ReLU.
        inner: The width inside added blocks: the target's ("own"), or the stream's ("stream", as in the public code).

    Raises:
        UserError: A layer cannot be added, merged or removed. The message has its name.
    """
    if _one_structure(structure, wiring) and all(ours == theirs for ours, theirs in matches.items()):
        for layer in wiring.layers:
            check_design(layer.name, target.get_submodule(layer.name), layer.name, network.get_submodule(layer.name))
        return unchanged(network, wiring)
    _check_known(structure, wiring)
    return _Builder(target, structure, network, wiring, dict(matches), signs or {}, inner).build()


def _one_structure(one: Wiring, other: Wiring) -> bool:
    """Return whether two networks have the same layers under the same names, and the same tensors."""
    nodes = [[(layer.name, layer.kind, layer.node, layer.weight) for layer in wiring.layers] for wiring in (one, other)]
    tensors = [[name for axis in wiring.axes for name in ((slot.tensor, slot.dim) for slot in axis.slots)]
               for wiring in (one, other)]  # fmt: skip
    return nodes[0] == nodes[1] and sorted(tensors[0]) == sorted(tensors[1])


def _check_known(*wirings: Wiring) -> None:
    """Raise UserError unless networks that have to be rebuilt consist of plain layers only."""
    for wiring in wirings:
        for layer in wiring.layers:
            if layer.kind not in BALANCED or layer.weight not in ("", f"{layer.name}.weight"):
                raise UserError(
                    f"layer '{layer.name}' ({layer.kind}): networks with such layers can only be fused at one depth and "
                    "one structure; use networks with the same layers"
                )
        names = {layer.name for layer in wiring.layers}
        for slot in (slot for axis in wiring.axes for slot in axis.slots):
            if slot.tensor.rpartition(".")[0] not in names:
                raise UserError(
                    f"tensor '{slot.tensor}' belongs to no layer: networks with such tensors can only be fused at one depth "
                    "and one structure; use networks with the same layers"
                )


class _Builder:
    """Walks through the structure and collects the tensors of the new network."""

    def __init__(
        self, target: nn.Module, structure: Wiring, network: nn.Module, wiring: Wiring, matches: dict[int, int],
        signs: Mapping[str, Tensor], inner: str,
    ) -> None:  # fmt: skip
        self.target, self.structure, self.network, self.wiring = target, structure, network, wiring
        self.matches, self.signs, self.inner = matches, signs, inner
        self.goal, self.have = dict(target.named_modules()), dict(network.named_modules())
        self.state: State = {}
        self.dropped: set[str] = set()  # norms that cannot be an identity
        self.spare: State = {}  # their tensors, for wiring
        self.added: set[str] = set()
        self.origins: dict[str, str] = {}
        self.sources: dict[str, Source] = {}
        self.last: Source | None = None  # the latest pre-activation of the stream
        self.end = ""  # its node in the structure
        self.width = wiring.axes[wiring.layers[0].inputs].size
        self.factor: tuple[Tensor, Tensor] | None = (
            None  # weight and bias of merged linear layers that the next layer absorbs
        )
        self.stale = False

    def build(self) -> Balanced:
        done = 0  # number of the network's units processed
        for index, unit in enumerate(self.structure.units):
            if index not in self.matches:
                ADD[unit.kind](self, unit, self._entries(index))
                continue
            partner = self.wiring.units[self.matches[index]]
            self._merge(self.wiring.units[done : self.matches[index]])
            self._copy(unit.layers, partner.layers, unit, partner)
            done = self.matches[index] + 1
        self._merge(self.wiring.units[done:])
        self._copy(outside_units(self.structure), outside_units(self.wiring), None, None)
        network = with_state(self.target, {name: tensor.clone() for name, tensor in self.state.items()}, self.dropped)
        complete = with_state(self.target, self.state | self.spare) if self.dropped else network
        notes = tuple(f"{name}: added without its norm, which has no identity" for name in sorted(self.dropped))
        return Balanced(network, complete, frozenset(self.added), self.origins, self.sources, self.stale, notes)

    def _entries(self, index: int) -> int:
        """Return the input width of the network's next own layer after an index in the structure."""
        later = [theirs for ours, theirs in self.matches.items() if ours > index]
        names = self.wiring.units[min(later)].layers if later else outside_units(self.wiring)
        first = next(module for module in map(self.have.__getitem__, names) if not isinstance(module, NORMS))
        return first.get_parameter("weight").shape[1]

    def _merge(self, units: Sequence[Unit]) -> None:
        for unit in units:
            MERGE[unit.kind](self, unit)
            self.stale = True

    def _copy(self, ours: tuple[str, ...], theirs: tuple[str, ...], unit: Unit | None, partner: Unit | None) -> None:
        """Copy matched layers: the network's own weights under the structure's names."""
        points = _points(self.structure, ours, unit), _points(self.wiring, theirs, partner)
        if len(ours) != len(theirs) or len(points[0]) != len(points[1]):
            names = unit.name if unit else "output", partner.name if partner else "output"
            uses = [_uses(self.structure, ours), _uses(self.wiring, theirs)]
            raise other_design(names, [len(ours), len(theirs)], uses)
        for name, other in zip(ours, theirs, strict=True):
            check_design(name, self.goal[name], other, self.have[other])
            self.origins[name] = other
            if self.factor is not None and self.factor[1].any() and self.have[other]._parameters.get("bias") is None:
                raise UserError(f"layer '{other}' has no bias to absorb those of the layers merged into it")
            for tensor, entry in tensors_of(self.have[other]).items():
                self.state[f"{name}.{tensor}"] = self._after_merged(tensor, entry, self.have[other])
            if not isinstance(self.have[other], NORMS):
                self.factor = None
        for node, other in zip(_nodes(self.structure, ours, unit), _nodes(self.wiring, theirs, partner), strict=True):
            self.sources[node] = Source(other)
        for node, other in zip(*points, strict=True):
            self.sources[node] = self.last = Source(other)
            self.end = node
        if partner is not None:
            last = [self.have[name] for name in partner.layers if not isinstance(self.have[name], NORMS)][-1]
            self.width = partner.shape[-1 if isinstance(last, nn.Linear | nn.Embedding) else 0]

    def _after_merged(self, tensor: str, entry: Tensor, module: nn.Module) -> Tensor:
        """Return a layer's tensor with the layers merged before it: W (W_k x + b_k) + b."""
        if self.factor is None or not isinstance(module, nn.Linear):
            return entry
        weight, bias = self.factor
        return entry @ weight if tensor == "weight" else entry + module.weight.detach() @ bias

    def _merge_layer(self, unit: Unit) -> None:
        """Fold a linear layer and its ReLU, as the diagonal D, into the next one."""
        layer = self.have[unit.layers[0]]
        if not isinstance(layer, nn.Linear) or len(unit.layers) != 1:
            raise UserError(f"layer '{unit.name}' cannot be merged into the next one: only linear layers without norm can; "
                            "use the deeper network's depth")  # fmt: skip
        diagonal = self.signs[unit.node].to(layer.weight)
        weight, bias = (self._after_merged(name, entry, layer) for name, entry in with_bias(layer).items())
        self.factor = diagonal[:, None] * weight, diagonal * bias

    def _remove_block(self, unit: Unit) -> None:
        if not unit.identity_skip:
            raise UserError(f"block '{unit.name}' cannot be removed: its skip is not an identity")

    def _add_layer(self, unit: Unit, entries: int) -> None:
        width = entries if len(unit.shape) == 1 else self.width
        for name in unit.layers:
            module = self.goal[name]
            if isinstance(module, NORMS):
                self._neutral_norm(name, module, width)
            else:
                self._put(name, {"weight": identity(name, module, width), "bias": torch.zeros(width)}, module)
        self._carry_on(unit, _points(self.structure, unit.layers, unit), rectified=True)

    def _add_block(self, unit: Unit, entries: int) -> None:
        if not unit.identity_skip:
            raise UserError(f"block '{unit.name}' cannot be added: its skip is not an identity")
        width, previous = self.width, 0  # of the added layer's inputs; outputs of the target's layer before it
        last = [name for name in unit.layers if not isinstance(self.goal[name], NORMS)][-1]
        for name in unit.layers:
            module = self.goal[name]
            if isinstance(module, NORMS):
                self._neutral_norm(name, module, width)
                continue
            shape = module.get_parameter("weight").shape
            grouped = getattr(module, "groups", 1) > 1
            if previous and not grouped and shape[1] != previous:  # attention reads a third of its inputs' layer
                if self.inner == "stream":
                    raise UserError(f"block '{unit.name}' has attention, which cannot be added in the public code's way")
                width = shape[1]
            out = self.width if name == last or self.inner == "stream" else shape[0]
            out, inputs = (width, 1) if grouped else (out, width)
            self._put(name, {"weight": torch.zeros(out, inputs, *shape[2:]), "bias": torch.zeros(out)}, module)
            width, previous = out, shape[0]
        total = next(node for node in self.structure.graph.graph.nodes if node.name == unit.sum)
        straight = self.end in {node.name for node in total.all_input_nodes}  # no ReLU before the skip
        self._carry_on(unit, [node for node in _points(self.structure, unit.layers, unit) if node == unit.sum], not straight)

    def _carry_on(self, unit: Unit, nodes: list[str], rectified: bool) -> None:
        """Record that the added unit passes on what precedes it."""
        if self.last is None:  # only the input precedes it
            self.stale = True
            return
        self.last = Source(self.last.node, self.last.rectified or rectified)
        for node in nodes:
            self.sources[node], self.end = self.last, node

    def _neutral_norm(self, name: str, module: nn.Module, width: int) -> None:
        """Add BatchNorm as an identity in eval mode; leave out other norms, which cannot be an identity."""
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or not module.track_running_stats:
            self.dropped.add(name)
            known = {key: tensor for key, tensor in tensors_of(module).items() if tensor.ndim}
            self.spare |= {f"{name}.{key}": tensor.new_ones(width) for key, tensor in known.items()}
            return
        neutral = {
            "weight": torch.ones(width),
            "bias": torch.zeros(width),
            "running_mean": torch.zeros(width),
            "running_var": torch.full((width,), 1.0 - module.eps),
            "num_batches_tracked": torch.ones((), dtype=torch.int64),
        }
        self._put(name, neutral, module)

    def _put(self, name: str, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        for tensor, entry in tensors_of(module).items():
            self.state[f"{name}.{tensor}"] = tensors[tensor].to(entry)
            self.added.add(f"{name}.{tensor}")


ADD: dict[str, Callable[[_Builder, Unit, int], None]] = {"layer": _Builder._add_layer, "block": _Builder._add_block}
MERGE: dict[str, Callable[[_Builder, Unit], None]] = {"layer": _Builder._merge_layer, "block": _Builder._remove_block}


def relu_signs(features: Mapping[str, Tensor], method: str) -> dict[str, Tensor]:
    """Return D [channels], the diagonal that replaces a node's ReLU, from its values [channels, samples]. CLA+OT, Sec. 3.2.

    `method` "sum": 1 if the sum is not negative. "majority": 1 if at least half are positive. "average": the share of
    positive ones.
    """
    return {node: SIGNS[method](values.double()) for node, values in features.items()}


SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: (values.sum(dim=1) >= 0).double(),
    "majority": lambda values: ((values > 0).double().mean(dim=1) >= 0.5).double(),
    "average": lambda values: (values > 0).double().mean(dim=1),
}


def outside_units(wiring: Wiring) -> tuple[str, ...]:
    """Return the layers outside of units: those of the output."""
    inside = {name for unit in wiring.units for name in unit.layers}
    return tuple(layer.name for layer in wiring.layers if layer.name not in inside)


def _nodes(wiring: Wiring, layers: tuple[str, ...], unit: Unit | None) -> list[str]:
    """Return the output nodes of these layers in order of execution, then a block's sum."""
    nodes = [layer.node for layer in wiring.layers if layer.name in layers]
    return [*nodes, unit.sum] if unit is not None and unit.kind == "block" else nodes


def _uses(wiring: Wiring, layers: tuple[str, ...]) -> int:
    return max((sum(layer.name == name for layer in wiring.layers) for name in layers), default=0)


def _points(wiring: Wiring, layers: tuple[str, ...], unit: Unit | None) -> list[str]:
    """Return the pre-activations of these layers in order of execution, with a block's sum."""
    selected: list[Layer] = [layer for layer in wiring.layers if layer.name in layers]
    nodes = {layer.node for layer in selected}
    if unit is not None and unit.kind == "block":
        nodes.add(unit.sum)
    points = {node for each in wiring.points.values() for node in each}
    return [node.name for node in wiring.graph.graph.nodes if node.name in nodes and node.name in points]
