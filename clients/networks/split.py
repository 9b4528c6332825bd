"""A network cut at a named point into an extractor, which computes features, and a task head, which reads them.

Any network, including torchvision's and users' own, can be cut where a single tensor passes. The head may be another
network, which takes features as a whole network takes images (Gygli et al. 2021, Sec. 3 and 5.2).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, SelfStarting, initialise
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.plugins import error_summary
from fedloom.conf.typed import option
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.graph.undisturbed import undisturbed


class UnitLength(nn.Module):
    """Divides the features [n, c, ...] of each image by their L2 norm."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features.flatten(1)).view_as(features)


class SelfStartingSplit(Network, SelfStarting):
    """A cut network of which a part draws its own weights. `whole`: the networks it was cut from."""

    def __init__(self, extractor: nn.Module, head: nn.Module, whole: Sequence[SelfStarting]) -> None:
        super().__init__(extractor, head)
        self._whole = tuple(whole)  # in a tuple, so that they are not submodules

    def restart(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for part in (self.extractor, self.head):
            initialise(part, generator)
        for whole in self._whole:
            whole.restart(seed)


@dataclass(frozen=True)
class _Cutting(NetworkSpec):
    """Another network, and the point where it is cut."""

    of: dict[str, Any] = option({"name": "conv6"}, "the network: name and options", named=True)
    at: str = option("", "the point where it is cut ('fedloom networks NAME' lists them); empty: before its last layer")

    @property
    def constants(self) -> bool:
        return any(NETWORKS.build(section, where).constants for where, section in self.sections().items())

    def sections(self) -> dict[str, Mapping[str, Any]]:
        """Return the configuration's sections of the networks that this one is made of, by key."""
        return {"network.of": self.of}

    def cut(self, form: Form) -> tuple[nn.Module, nn.Module, Network]:
        """Return the part before the point, the part behind it, and the whole network.

        Raises UserError for an unknown point.
        """
        whole = NETWORKS.build(self.of, "network.of").build(form)
        graph = _traced(whole)
        places = _places(graph)
        if not places:
            raise UserError(
                f"network.of: '{self.of.get('name')}' cannot be cut: it has no point where only one tensor passes"
            )
        at = self.at or list(places)[-1]
        if at not in places:
            raise unknown("network.at", at, places)
        before, behind = _halves(graph, places[at])
        return before, behind, whole


@NETWORKS.register("split")
@dataclass(frozen=True)
class Split(_Cutting):
    """Another network, cut at a point: the first part is the extractor. The head is its rest, or another network."""

    channels: int = option(0, "channels of the features, made by a 1x1 convolution; 0: unchanged", low=0)
    side: int = option(0, "height and width of the features, made by averaging; 0: unchanged", low=0)
    unit: bool = option(False, "divide the features of each image by their L2 norm")
    head: dict[str, Any] = option(
        {}, "a network that reads the features, name and options; empty: the rest of the network", named=True
    )

    def sections(self) -> dict[str, Mapping[str, Any]]:
        return {"network.of": self.of, **({"network.head": self.head} if self.head else {})}

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError, naming both shapes, if head and extractor do not fit."""
        before, head, whole = self.cut(form)
        plain = _shape(before, form.zeros(1), "network.of")
        fitted = self._fitted(plain)
        shape = _shape(fitted, torch.zeros(1, *plain), "network")
        wholes = [whole]
        if self.head:
            if len(shape) != 3:
                raise UserError(f"network.head: takes features of channels x side x side, but they are {_named(shape)}")
            wholes.append(NETWORKS.build(self.head, "network.head").build(Form(IMAGE, shape, form.outputs)))
            head = wholes[-1]
        elif plain != shape and not self._fits_rest(head, shape):
            fault = f"the features are {_named(shape)}, but the rest of '{self.of['name']}' behind '{self.at}' takes"
            raise UserError(f"network: {fault} {_named(plain)}; set network.channels={plain[0]}, or a network.head")
        extractor = before if isinstance(fitted, nn.Identity) else nn.Sequential(OrderedDict(body=before, fit=fitted))
        own = [network for network in wholes if isinstance(network, SelfStarting)]
        return SelfStartingSplit(extractor, head, own) if own else Network(extractor, head)

    def _fitted(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the layers that convert features of this shape as the options say."""
        steps = OrderedDict[str, nn.Module]()
        if (self.channels or self.side) and len(shape) != 3:
            raise UserError(
                f"network.at: the features at '{self.at}' are {_named(shape)}; remove network.channels and network.side"
            )
        if self.channels:
            steps["project"] = nn.Conv2d(shape[0], self.channels, 1)
        if self.side:
            steps["pool"] = nn.AdaptiveAvgPool2d(self.side)
        if self.unit:
            steps["unit"] = UnitLength()
        return nn.Sequential(steps) if steps else nn.Identity()

    @staticmethod
    def _fits_rest(head: nn.Module, shape: tuple[int, ...]) -> bool:
        try:
            _shape(head, torch.zeros(1, *shape), "")
        except UserError:
            return False
        return True


@NETWORKS.register("rest")
@dataclass(frozen=True)
class Rest(_Cutting):
    """The part of another network behind a point, as a head: it takes that network's features in place of images."""

    channels: int = option(3, "channels of the images that the whole network is for", low=1)
    size: int = option(32, "size of the images that the whole network is for", low=1)

    def build(self, form: Form) -> Network:
        """Build the head for features [n, *form.shape]. Raises UserError, naming both shapes, if they differ."""
        images = Form.images(self.channels, self.size, form.outputs)
        before, behind, whole = self.cut(images)
        takes = _shape(before, images.zeros(1), "network.of")
        try:
            _shape(behind, form.zeros(1), "network.head")
        except UserError:
            fault = f"the rest of '{self.of['name']}' behind '{self.at}' takes features of {_named(takes)}"
            raise UserError(f"network.head: {fault}, but they are {_named(form.shape)}") from None
        parts = nn.Sequential(), behind
        return SelfStartingSplit(*parts, [whole]) if isinstance(whole, SelfStarting) else Network(*parts)


def split_points(network: Network, images: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the points where a network can be cut, in order, with the shape of the features of one of `images` there.

    Raises UserError for a network that torch.fx cannot trace.
    """
    graph = _traced(network)
    names: dict[fx.Node, str] = {}
    for name, node in _places(graph).items():
        names.setdefault(node, name)  # a container's name rather than its last layer's
    return {name: _shape(_halves(graph, node)[0], images, "network") for node, name in names.items()}


def pieces(network: Network, groups: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Divide a network into a chain of modules that share its weights. `groups`: names of layers, from the input.

    There is one module for each group, with everything up to the next group, and last the head. Raises UserError, naming
    the layers, if the network cannot be cut between two groups.
    """
    graph = _traced(network)
    nodes = list(graph.graph.nodes)
    inside = [
        {*map(id, graph.get_submodule(str(node.target)).modules())} if node.op == "call_module" else set() for node in nodes
    ]
    ends, points = [], {*_places(graph).values()}
    firsts, lasts = zip(
        *(_reach(inside, {id(network.get_submodule(name)) for name in group}) for group in groups), strict=True
    )
    head = _reach(inside, {*map(id, network.head.modules())})[0]
    for number, (last, first) in enumerate(zip(lasts, (*firsts[1:], head), strict=True)):
        between = [node for node in nodes[last:first] if node in points]
        if not between:
            following = groups[number + 1][0] if number + 1 < len(groups) else "the head"
            fault = f"cannot be cut between {groups[number][-1]} and {following}: several tensors pass"
            raise UserError(f"network: {fault}; put these layers into one group")
        ends.append(between[-1])
    return [_between(graph, start, end) for start, end in zip([None, *ends], [*ends, None], strict=True)]


def _reach(inside: Sequence[set[int]], wanted: set[int]) -> tuple[int, int]:
    """Return the indices of the first and the last node with one of these modules."""
    positions = [position for position, modules in enumerate(inside) if modules & wanted]
    return (positions[0], positions[-1]) if positions else (0, 0)


def _traced(network: Network) -> fx.GraphModule:
    """Trace the network as a graph of its layers and blocks.

    Containers are opened. Blocks stay whole modules, so that they retain their initialisation (fusion.graph opens blocks,
    too). Raises UserError if torch.fx cannot trace the network.
    """
    body = network.extractor
    steps = list(body.named_children()) if isinstance(body, nn.Sequential) else [("body", body)]
    chain = nn.Sequential(OrderedDict([*steps, ("classifier", network.head)]))
    tracer = _Tracer(None if isinstance(body, nn.Sequential) else body)
    try:
        with undisturbed(chain):
            return fx.GraphModule(chain, tracer.trace(chain))
    except Exception as error:
        raise UserError(f"network: cannot be cut: torch.fx cannot trace it ({error_summary(error)})") from error


class _Tracer(fx.Tracer):
    """Opens containers, and the module that is the network itself."""

    def __init__(self, body: nn.Module | None) -> None:
        super().__init__()
        self.body = body

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (isinstance(m, nn.Sequential) or m is self.body)


def _places(graph: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the output nodes of layers, blocks and containers, by name, where no other tensor is still needed."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    last = {node: max((order[user] for user in node.users), default=order[node]) for node in graph.graph.nodes}
    points: dict[str, fx.Node] = {}
    for index, node in enumerate(nodes[:-1]):
        alive = [other for other in order if order[other] <= order[node] < last[other] and other.op != "get_attr"]
        if alive != [node] or node.op != "call_module":
            continue
        path, after = str(node.target).split("."), str(nodes[index + 1].target).split(".")
        for depth in range(1, len(path) + 1):
            if path[:depth] != after[:depth]:
                points[".".join(path[:depth]).removeprefix("body.")] = node
    return {name: node for name, node in points.items() if name != "body"}


def _halves(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph from the input to a node, and the graph from the node to the output."""
    return _between(graph, None, node), _between(graph, node, None)


def _between(graph: fx.GraphModule, start: fx.Node | None, end: fx.Node | None) -> fx.GraphModule:
    """Return the graph from node `start` (None: the input) to node `end` (None: the output)."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    first, last = order[start] if start else -1, order[end] if end else len(order)
    part = fx.Graph()
    known = {start: part.placeholder("features")} if start else {}
    for node, number in order.items():
        positions = [order[user] for user in node.users] if node.op == "get_attr" else [number]
        if any(first < position <= last for position in positions):
            known[node] = part.node_copy(node, known.__getitem__)
    if end:
        part.output(known[end])
    return fx.GraphModule(graph, part)


def _shape(module: nn.Module, images: Tensor, where: str) -> tuple[int, ...]:
    """Return the shape of one image's features, without changes to the module. Raises UserError if it fails."""
    try:
        with torch.no_grad(), evaluating(module):
            return tuple(module(images).shape[1:])
    except Exception as error:
        raise UserError(f"{where}: fails on {_named(tuple(images.shape[1:]))} ({error_summary(error)})") from error


def _named(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
