"""A network cut in two at a named point: an extractor that gives features, and a task head that reads them.

Any network of ours or of the user's own, torchvision's included, can be cut where one tensor alone passes. The head may be
another network's: features are to it what images are to a whole network (Gygli et al. 2021, Sec. 3 and 5.2).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, SelfStarting, initialise
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.plugins import told
from fedloom.conf.typed import option
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.graph.undisturbed import undisturbed


class UnitLength(nn.Module):
    """Features [n, c, ...] divided by their L2 norm over all that is one image's."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features.flatten(1)).view_as(features)


class SelfStartingSplit(Network, SelfStarting):
    """A cut network part of which draws its own weights: `whole` is what it was cut from."""

    def __init__(self, extractor: nn.Module, head: nn.Module, whole: Sequence[SelfStarting]) -> None:
        super().__init__(extractor, head)
        self._whole = tuple(whole)  # which makes them no children

    def restart(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for part in (self.extractor, self.head):
            initialise(part, generator)
        for whole in self._whole:
            whole.restart(seed)


@dataclass(frozen=True)
class _Cutting(NetworkSpec):
    """Another network, and where it is cut."""

    of: dict[str, Any] = option({"name": "conv6"}, "the network: name and options", named=True)
    at: str = option("", "the point at which it is cut ('fedloom networks NAME' lists them); empty: before its last layer")

    @property
    def constants(self) -> bool:
        return any(NETWORKS.build(section, where).constants for where, section in self.sections().items())

    def sections(self) -> dict[str, Mapping[str, Any]]:
        """The networks that it is made of, by their keys."""
        return {"network.of": self.of}

    def cut(self, channels: int, size: int, classes: int) -> tuple[nn.Module, nn.Module, Network]:
        """What is before the point, what is behind it, and the whole network. UserError for a point that there is not."""
        whole = NETWORKS.build(self.of, "network.of").build(channels, size, classes)
        graph = _traced(whole)
        places = _places(graph)
        if not places:
            raise UserError(f"network.of: '{self.of.get('name')}' cannot be cut: nowhere one tensor alone passes")
        at = self.at or list(places)[-1]
        if at not in places:
            raise unknown("network.at", at, places)
        before, behind = _halves(graph, places[at])
        return before, behind, whole


@NETWORKS.register("split")
@dataclass(frozen=True)
class Split(_Cutting):
    """Extractor: another network up to a point. Head: its rest, or one of its own, which takes features as its images."""

    channels: int = option(0, "a 1x1 convolution makes so many channels of the features; 0: as many as there are", low=0)
    side: int = option(0, "the features are averaged to side x side; 0: as they are", low=0)
    unit: bool = option(False, "features are divided by their L2 norm, image by image")
    head: dict[str, Any] = option(
        {}, "a network that reads the features, name and options; empty: the rest of the network", named=True
    )

    def sections(self) -> dict[str, Mapping[str, Any]]:
        return {"network.of": self.of, **({"network.head": self.head} if self.head else {})}

    def build(self, channels: int, size: int, classes: int) -> Network:
        """The network for [n, channels, size, size] images. UserError if head and extractor do not fit, naming both."""
        before, head, whole = self.cut(channels, size, classes)
        plain = _shape(before, torch.zeros(1, channels, size, size), "network.of")
        fitted = self._fitted(plain)
        shape = _shape(fitted, torch.zeros(1, *plain), "network")
        wholes = [whole]
        if self.head:
            if len(shape) != 3:
                raise UserError(f"network.head: takes features of channels x side x side, there are {_named(shape)}")
            wholes.append(NETWORKS.build(self.head, "network.head").build(shape[0], shape[1], classes))
            head = wholes[-1]
        elif plain != shape and not self._fits_rest(head, shape):
            told = f"the features are {_named(shape)}, and the rest of '{self.of['name']}' behind '{self.at}' takes"
            raise UserError(f"network: {told} {_named(plain)}; set network.channels={plain[0]}, or a network.head")
        extractor = before if isinstance(fitted, nn.Identity) else nn.Sequential(OrderedDict(body=before, fit=fitted))
        own = [one for one in wholes if isinstance(one, SelfStarting)]
        return SelfStartingSplit(extractor, head, own) if own else Network(extractor, head)

    def _fitted(self, shape: tuple[int, ...]) -> nn.Module:
        """What brings features of this shape to what is asked for."""
        steps = OrderedDict[str, nn.Module]()
        if (self.channels or self.side) and len(shape) != 3:
            raise UserError(
                f"network.at: the features at '{self.at}' are {_named(shape)}, and neither channels nor side fit"
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
    """What another network has behind a point, as a head: it takes that network's features for images."""

    channels: int = option(3, "of the images that the whole network is for", low=1)
    size: int = option(32, "of the images that the whole network is for", low=1)

    def build(self, channels: int, size: int, classes: int) -> Network:
        """The network for [n, channels, size, size] features. UserError if they do not fit, naming both shapes."""
        before, behind, whole = self.cut(self.channels, self.size, classes)
        takes = _shape(before, torch.zeros(1, self.channels, self.size, self.size), "network.of")
        try:
            _shape(behind, torch.zeros(1, channels, size, size), "network.head")
        except UserError:
            told = f"the rest of '{self.of['name']}' behind '{self.at}' takes features of {_named(takes)}"
            raise UserError(f"network.head: {told}, there are {_named((channels, size, size))}") from None
        parts = nn.Sequential(), behind
        return SelfStartingSplit(*parts, [whole]) if isinstance(whole, SelfStarting) else Network(*parts)


def split_points(network: Network, images: Tensor) -> dict[str, tuple[int, ...]]:
    """The points at which a network can be cut, in order, with the shape of one image's features there.

    UserError for a network that torch.fx cannot trace.
    """
    graph = _traced(network)
    names: dict[fx.Node, str] = {}
    for name, node in _places(graph).items():
        names.setdefault(node, name)  # of a container and its last layer the container's
    return {name: _shape(_halves(graph, node)[0], images, "network") for node, name in names.items()}


def pieces(network: Network, groups: Sequence[Sequence[str]]) -> list[nn.Module]:
    """The network as a chain of modules that are its own: one for each group of layers, in order, with all that is behind
    them up to the next group, and last the head. UserError if groups cannot be told apart, naming their layers.
    """
    graph = _traced(network)
    nodes = list(graph.graph.nodes)
    inside = [{id(one) for one in graph.get_submodule(str(node.target)).modules()} if node.op == "call_module" else set()
              for node in nodes]  # fmt: skip
    ends, places = [], {*_places(graph).values()}
    firsts, lasts = zip(
        *(_reach(inside, {id(network.get_submodule(name)) for name in group}) for group in groups), strict=True
    )
    head = _reach(inside, {id(one) for one in network.head.modules()})[0]
    for place, (last, first) in enumerate(zip(lasts, (*firsts[1:], head), strict=True)):
        between = [node for node in nodes[last:first] if node in places]
        if not between:
            following = groups[place + 1][0] if place + 1 < len(groups) else "the head"
            told = f"there is no point between {groups[place][-1]} and {following} at which one tensor alone passes"
            raise UserError(f"network: {told}; group these layers together")
        ends.append(between[-1])
    return [_between(graph, start, end) for start, end in zip([None, *ends], [*ends, None], strict=True)]


def _reach(inside: Sequence[set[int]], wanted: set[int]) -> tuple[int, int]:
    """The places of the first and of the last node that has one of these modules."""
    found = [place for place, modules in enumerate(inside) if modules & wanted]
    return (found[0], found[-1]) if found else (0, 0)


def _traced(network: Network) -> fx.GraphModule:
    """The network as a graph of its layers and blocks; containers are opened, blocks stay whole modules (fusion.graph opens
    these, too), so that they keep what they do at the start. UserError if it cannot be."""
    body = network.extractor
    steps = list(body.named_children()) if isinstance(body, nn.Sequential) else [("body", body)]
    chain = nn.Sequential(OrderedDict([*steps, ("classifier", network.head)]))
    tracer = _Tracer(None if isinstance(body, nn.Sequential) else body)
    try:
        with undisturbed(chain):
            return fx.GraphModule(chain, tracer.trace(chain))
    except Exception as error:
        raise UserError(f"network: cannot be cut: torch.fx cannot trace it ({told(error)})") from error


class _Tracer(fx.Tracer):
    """Opens containers and one module that is no block but the network itself."""

    def __init__(self, body: nn.Module | None) -> None:
        super().__init__()
        self.body = body

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (isinstance(m, nn.Sequential) or m is self.body)


def _places(graph: fx.GraphModule) -> dict[str, fx.Node]:
    """By name of a layer, block or container, the node of its outputs, where these are all that goes on from there."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    last = {node: max((order[user] for user in node.users), default=order[node]) for node in graph.graph.nodes}
    found: dict[str, fx.Node] = {}
    for place, node in enumerate(nodes[:-1]):
        alive = [one for one in order if order[one] <= order[node] < last[one] and one.op != "get_attr"]
        if alive != [node] or node.op != "call_module":
            continue
        words, after = str(node.target).split("."), str(nodes[place + 1].target).split(".")
        for depth in range(1, len(words) + 1):
            if words[:depth] != after[:depth]:
                found[".".join(words[:depth]).removeprefix("body.")] = node
    return {name: node for name, node in found.items() if name != "body"}


def _halves(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What computes a node's tensor from the input, and what computes the output from it."""
    return _between(graph, None, node), _between(graph, node, None)


def _between(graph: fx.GraphModule, start: fx.Node | None, end: fx.Node | None) -> fx.GraphModule:
    """What computes the tensor of node `end` (None: the output) from that of `start` (None: the input)."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    first, last = order[start] if start else -1, order[end] if end else len(order)
    part = fx.Graph()
    known = {start: part.placeholder("features")} if start else {}
    for one, number in order.items():
        places = [order[user] for user in one.users] if one.op == "get_attr" else [number]
        if any(first < place <= last for place in places):
            known[one] = part.node_copy(one, known.__getitem__)
    if end:
        part.output(known[end])
    return fx.GraphModule(graph, part)


def _shape(module: nn.Module, images: Tensor, where: str) -> tuple[int, ...]:
    """Of one image's features; nothing in the module changes. UserError if it fails."""
    try:
        with torch.no_grad(), evaluating(module):
            return tuple(module(images).shape[1:])
    except Exception as error:
        raise UserError(f"{where}: fails on {_named(tuple(images.shape[1:]))} ({told(error)})") from error


def _named(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
