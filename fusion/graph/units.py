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

    name: path of the module that has its weight; kind: "linear", "conv", "grouped" (in groups of several channels),
    "depthwise", "transposed", "embedding" or "norm"; node: name of its fx node; inputs, outputs: axis indices (equal for
    norm and depthwise; the first, where it reads or writes several); shape: of its output, without the batch dimension;
    weight: name of its weight in the state dict, "" for none.
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
    """A hidden layer (kind "layer"; convolution or linear) or a residual block (kind "block").

    name: layer name, or common module path of the block's layers; layers: names of its layers in order, with the norms
    and depthwise convolutions that belong to them and, for a block, the shortcut's; node: fx node whose output
    represents it, for a block that of the last convolution of the residual branch, before norm and sum; group:
    alignment may not cross groups; axis: of its output, for a block after the sum; shape: of the node's output, without
    the batch dimension; identity_skip: a block whose other branch has no layers; sum: fx node of a block's sum, "" for a
    layer.
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
    """The tensors of a network in order of execution, and what they are.

    sources: the nodes that each node's tensor is computed from (empty for the input); layers: by node; sums: the nodes
    that add two tensors; axes: axis index of each node; fixed: those of the network's input and output.
    """

    sources: Mapping[Node, tuple[Node, ...]]
    layers: Mapping[Node, Layer]
    sums: frozenset[Node]
    axes: Mapping[Node, int]
    fixed: frozenset[int]

    def anchor(self, node: Node) -> Node:
        """The node itself, or the nearest before it, that is a convolution (not depthwise), a linear layer, a sum or
        the network's input."""
        while not self._is_anchor(node):
            node = self.sources[node][0]
        return node

    def _is_anchor(self, node: Node) -> bool:
        return node in self.sums or not self.sources[node] or self.is_kind(node, WEIGHTED)

    def is_kind(self, node: Node, kinds: Iterable[str]) -> bool:
        """Whether the node is a layer of one of these kinds."""
        return node in self.layers and self.layers[node].kind in kinds


@dataclass
class _Draft:
    """A unit in the making."""

    kind: str
    node: Node
    output: Node
    fork: Node
    members: list[Node] = field(default_factory=list)
    name: str = ""
    identity_skip: bool = False


def find_units(flow: Flow) -> tuple[Unit, ...]:
    """All units in order of execution, each layer in one at most: of nested blocks the outermost counts, of several
    calls of a layer the first. What ends in a fixed axis is no unit.
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
    """Norms and depthwise convolutions outside blocks go with the layer or block that feeds them."""
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
    """For each node the set of nodes it depends on, itself among them, as bits in order of execution."""
    sets: dict[Node, int] = {}
    for node, index in order.items():
        sets[node] = 1 << index
        for source in flow.sources[node]:
            sets[node] |= sets[source]
    return sets


def _block(flow: Flow, add: Node, nodes: list[Node], ancestors: Mapping[Node, int]) -> _Draft | None:
    """The block that ends in `add`; None if no convolution or linear layer lies between fork and sum.

    The fork is the last node that both operands depend on; the residual branch the one of more layers.
    """
    first, second = flow.sources[add]
    fork = nodes[(ancestors[first] & ancestors[second]).bit_length() - 1]

    def branch(operand: Node) -> list[Node]:
        """Layers that the operand depends on and that depend on the fork."""
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
    """Give the block the module path that its layers, and none of the others but norms, have in common; else its node's."""
    paths = [flow.layers[node].name.split(".") for node in block.members]
    name = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    own = {flow.layers[node].name for node in block.members}
    others = [layer.name for layer in flow.layers.values() if layer.kind in MIXING and layer.name not in own]
    alone = name and not any(other == name or other.startswith(name + ".") for other in others)
    block.name = name if alone else flow.layers[block.node].name
    return block


def _outermost(flow: Flow, blocks: list[_Draft], order: Mapping[Node, int]) -> list[_Draft]:
    """Blocks without common layers: of those that overlap, the one of most layers; of the same layers, the last sum."""
    kept: list[_Draft] = []
    taken: set[str] = set()

    def rank(block: _Draft) -> tuple[int, int, int]:
        return -len(block.members), min(order[node] for node in block.members), -order[block.output]

    for block in sorted(blocks, key=rank):
        names = {flow.layers[node].name for node in block.members}
        if taken.isdisjoint(names):
            kept.append(block)
            taken |= names
    return sorted(kept, key=lambda block: order[block.output])


def _claim_norms_ahead(flow: Flow, block: _Draft, taken: set[str]) -> set[str]:
    """Add to the block the norms right before its fork that are its own, and return their names.

    A pre-activation block with a convolution as shortcut forks only after norm and activation. Its own are those under
    its module path; if it has none, those that follow a sum.
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
    """Units with groups: a new one starts where kind, resolution or, for blocks, the number of channels changes."""
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
