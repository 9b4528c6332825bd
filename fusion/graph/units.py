"""Units of a wired network: the hidden layers and residual blocks that layer alignment maps as a whole."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from torch.fx import Node

WEIGHTED = ("conv", "linear", "grouped", "transposed", "embedding")
MIXING = (*WEIGHTED, "depthwise")


@dataclass(frozen=True)
class Layer:
    """A convolution, linear or norm layer, in one of its calls.

    Attributes:
        name: The path of the module with its weight.
        kind: "linear", "conv", "grouped" (in groups of several channels), "depthwise", "transposed", "embedding" or
            "norm".
        node: The name of its fx node.
        inputs: The axis index of its inputs; the first, if it reads several.
        outputs: The axis index of its outputs; the first, if it writes several. Equal to `inputs` for norm and
            depthwise.
        shape: Of its output, without the batch dimension.
        weight: The name of its weight in the state dict; "" for none.
    """

    name: str
    kind: str
    node: str
    inputs: int
    outputs: int
    shape: tuple[int, ...]
    weight: str = ""


@dataclass(frozen=True)
class Unit:
    """A unit that fusion aligns as a whole: a hidden layer, or a residual block.

    Attributes:
        name: The layer's name, or the common module path of the block's layers.
        kind: "layer" (a convolution or linear layer), or "block".
        layers: The names of its layers in order. They include norms, depthwise convolutions and a block's shortcut.
        node: The fx node whose output represents the unit. For a block, it is the last convolution of the residual
            branch, before norm and sum.
        group: The number of its group. Alignment only matches units of corresponding groups.
        axis: The index of the axis (channels that move as one) of its output; for a block, after the sum.
        shape: The shape of the node's output, without the batch dimension.
        identity_skip: Whether the block's shortcut has no layers.
        sum: The fx node of a block's sum; "" for a layer.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    node: str
    group: int
    axis: int
    shape: tuple[int, ...]
    identity_skip: bool = False
    sum: str = ""


@dataclass(frozen=True)
class Flow:
    """The tensors of a network in order of execution.

    Attributes:
        sources: The nodes that each node's tensor is computed from; empty for the input.
        layers: The layer of a node.
        sums: The nodes that add two tensors.
        axes: The axis index of each node.
        fixed: The axes of the network's input and output.
    """

    sources: Mapping[Node, tuple[Node, ...]]
    layers: Mapping[Node, Layer]
    sums: frozenset[Node]
    axes: Mapping[Node, int]
    fixed: frozenset[int]

    def anchor(self, node: Node) -> Node:
        """Return the nearest node, at or before `node`, that is a convolution, linear layer, sum or the input.

        Depthwise convolutions do not count.
        """
        while not self._is_anchor(node):
            node = self.sources[node][0]
        return node

    def _is_anchor(self, node: Node) -> bool:
        return node in self.sums or not self.sources[node] or self.is_kind(node, WEIGHTED)

    def is_kind(self, node: Node, kinds: Iterable[str]) -> bool:
        """Return whether the node is a layer of one of these kinds."""
        return node in self.layers and self.layers[node].kind in kinds


@dataclass
class _Draft:
    """A unit before it is numbered."""

    kind: str
    node: Node
    output: Node
    fork: Node
    members: list[Node] = field(default_factory=list)
    name: str = ""
    identity_skip: bool = False


def find_units(flow: Flow) -> tuple[Unit, ...]:
    """Return all units in order of execution.

    A layer is in one unit at most. The outermost of nested blocks counts, and the first of several calls of a layer.
    Layers that write a fixed axis form no unit.
    """
    order = {node: index for index, node in enumerate(flow.sources)}
    blocks = _outermost(flow, _blocks(flow, order), order)
    taken = {flow.layers[node].name for block in blocks for node in block.members}
    for block in blocks:
        taken |= _claim_norms_ahead(flow, block, taken)
    layers: dict[str, _Draft] = {}
    for node, layer in flow.layers.items():
        if layer.kind in WEIGHTED and layer.name not in taken and layer.outputs not in flow.fixed:
            layers.setdefault(layer.name, _Draft("layer", node, node, node, [node], layer.name))
    drafts = [*blocks, *layers.values()]
    _share_out_followers(flow, drafts, taken)
    for draft in drafts:
        draft.members.sort(key=order.__getitem__)
    return _numbered(flow, sorted(drafts, key=lambda draft: order[draft.members[0]]))


def _share_out_followers(flow: Flow, drafts: list[_Draft], taken: set[str]) -> None:
    """Assign norms and depthwise convolutions outside of blocks to the layer or block that feeds them."""
    feeds = {draft.output: draft for draft in drafts}
    for node, layer in flow.layers.items():
        owner = feeds.get(flow.anchor(node))
        if layer.kind not in WEIGHTED and layer.name not in taken and owner is not None:
            owner.members.append(node)


def _blocks(flow: Flow, order: Mapping[Node, int]) -> list[_Draft]:
    nodes, ancestors = list(order), _ancestors(flow, order)
    drafts = [_block(flow, add, nodes, ancestors) for add in nodes if add in flow.sums and flow.axes[add] not in flow.fixed]
    return [_named(flow, draft) for draft in drafts if draft is not None]


def _ancestors(flow: Flow, order: Mapping[Node, int]) -> dict[Node, int]:
    """Return, for each node, the set of nodes that it depends on, with itself, as bits in order of execution."""
    sets: dict[Node, int] = {}
    for node, index in order.items():
        sets[node] = 1 << index
        for source in flow.sources[node]:
            sets[node] |= sets[source]
    return sets


def _block(flow: Flow, add: Node, nodes: list[Node], ancestors: Mapping[Node, int]) -> _Draft | None:
    """Return the block that ends in `add`; None if no convolution or linear layer is between fork and sum.

    The fork is the last node that both operands depend on. The residual branch is the one with more layers.
    """
    first, second = flow.sources[add]
    fork = nodes[(ancestors[first] & ancestors[second]).bit_length() - 1]

    def branch(operand: Node) -> list[Node]:
        """Return the layers that the operand depends on and that depend on the fork."""
        return [
            node
            for index, node in enumerate(nodes)
            if ancestors[operand] >> index & 1 and ancestors[node] & ancestors[fork] == ancestors[fork]
            if node in flow.layers and node is not fork
        ]

    short, long = sorted((branch(second), branch(first)), key=lambda one: (_mixing(flow, one), len(one)))
    if not _mixing(flow, long):
        return None
    last = [node for node in long if flow.is_kind(node, MIXING)][-1]
    return _Draft("block", last, add, fork, list(dict.fromkeys([*short, *long])), identity_skip=not short)


def _mixing(flow: Flow, branch: Iterable[Node]) -> int:
    return sum(flow.is_kind(node, MIXING) for node in branch)


def _named(flow: Flow, block: _Draft) -> _Draft:
    """Name the block after the module path that only its layers (and norms) share; otherwise after its node."""
    paths = [flow.layers[node].name.split(".") for node in block.members]
    name = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    own = {flow.layers[node].name for node in block.members}
    others = [layer.name for layer in flow.layers.values() if layer.kind in MIXING and layer.name not in own]
    alone = name and not any(other == name or other.startswith(name + ".") for other in others)
    block.name = name if alone else flow.layers[block.node].name
    return block


def _outermost(flow: Flow, blocks: list[_Draft], order: Mapping[Node, int]) -> list[_Draft]:
    """Return blocks without common layers.

    Of overlapping blocks, the one with the most layers counts; with the same layers, the last sum.
    """
    outermost: list[_Draft] = []
    taken: set[str] = set()

    def rank(block: _Draft) -> tuple[int, int, int]:
        return -len(block.members), min(order[node] for node in block.members), -order[block.output]

    for block in sorted(blocks, key=rank):
        names = {flow.layers[node].name for node in block.members}
        if taken.isdisjoint(names):
            outermost.append(block)
            taken |= names
    return sorted(outermost, key=lambda block: order[block.output])


def _claim_norms_ahead(flow: Flow, block: _Draft, taken: set[str]) -> set[str]:
    """Add the norms directly before a block's fork to the block, if they belong to it, and return their names.

    A pre-activation block with a convolution as shortcut forks only after norm and activation. Its norms are those
    under its module path; without a path, those that follow a sum.
    """
    claimed: dict[Node, str] = {}
    node, anchor = block.fork, flow.anchor(block.fork)
    flat = block.name == flow.layers[block.node].name
    while node is not anchor:
        name = flow.layers[node].name if flow.is_kind(node, ("norm",)) else ""
        if name and name not in taken and (anchor in flow.sums if flat else name.startswith(block.name + ".")):
            claimed[node] = name
        node = flow.sources[node][0]
    block.members += claimed
    return set(claimed.values())


def _numbered(flow: Flow, drafts: Iterable[_Draft]) -> tuple[Unit, ...]:
    """Return units with groups.

    A new group starts where the kind, the resolution or a block's number of channels changes.
    """
    units: list[Unit] = []
    group, previous = -1, None
    for draft in drafts:
        layer = flow.layers[draft.node]
        key = _GROUP_KEYS[draft.kind](layer)
        group, previous = group + (key != previous), key
        names = tuple(dict.fromkeys(flow.layers[node].name for node in draft.members))
        axis, total = flow.axes[draft.output], draft.output.name if draft.kind == "block" else ""
        units.append(Unit(draft.name, draft.kind, names, layer.node, group, axis, layer.shape, draft.identity_skip, total))
    return tuple(units)


_GROUP_KEYS: dict[str, Callable[[Layer], tuple[object, ...]]] = {
    "layer": lambda layer: (layer.kind, layer.shape[1:]),
    "block": lambda layer: ("block", layer.shape[1:], layer.shape[0]),
}
