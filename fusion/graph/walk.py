"""The walk through a traced network that gives each tensor its labels, node by node, by the rules of the operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedloom.fusion.graph.labels import Atoms, Value, value_of, varied
from fedloom.fusion.graph.tracing import WiringError, operation, place, trace


class Refusal(ValueError):
    """Why a node cannot be wired; whoever knows the node makes a WiringError of it."""


LISTS = ("chunk", "split", "unbind", "tensor_split")  # functions whose result is a list of tensors
Rule = Callable[["Walk", Node], Value]


@dataclass(frozen=True)
class Rules:
    """How the labels of a node follow from those of its operands: by class of module (subclasses follow suit) and by name
    of function or method."""

    modules: Mapping[type, Rule]
    functions: Mapping[str, Rule]


@dataclass(frozen=True, eq=False)
class Found:
    """A layer in the making: atoms it reads and writes in place of axes; weight: its tensor, or None."""

    name: str
    kind: str
    weight: Tensor | None
    inputs: Tensor
    outputs: Tensor


class Walk:
    """Goes through the nodes in order of execution and gives each tensor a Value, by its rule."""

    def __init__(self, network: nn.Module, example: Tensor, rules: Rules) -> None:
        if example.ndim < 2:
            raise WiringError(f"node 'input_1': an example of {list(example.shape)}, takes [n, channels, ...]")
        self.trace = trace(network, example[:1])
        self.rules = rules
        self.names: dict[int, list[str]] = {}  # of one tensor of the state, by id: a shared one has several
        self.state = network.state_dict(keep_vars=True)
        for name, tensor in self.state.items():
            self.names.setdefault(id(tensor), []).append(name)
        self.atoms = Atoms()
        self.values: dict[Node, Value] = {}
        self.sources: dict[Node, tuple[Node, ...]] = {}  # of the nodes that depend on the input
        self.layers: dict[Node, Found] = {}
        self.sums: list[Node] = []
        self.softmax: list[tuple[Node, Tensor]] = []
        self.slots: dict[tuple[int, int], Tensor] = {}  # atoms [size] by id of tensor and dimension
        self.reads: set[tuple[int, int]] = set()  # the slots of what a layer reads
        self.blocks: dict[tuple[int, int], int] = {}  # slots of grouped convolutions: how many groups
        self.blocks_of: dict[int, Tensor] = {}  # all that a grouped convolution reads, by id of its weight

    def run(self) -> None:
        """Raises WiringError for the first node that no rule fits."""
        for node in self.trace.graph.graph.nodes:
            try:
                self._step(node)
            except (Refusal, NotImplementedError, RuntimeError, IndexError) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                raise WiringError(f"{place(node)}: {text}") from error

    def _step(self, node: Node) -> None:
        if node.op == "placeholder":
            shape = self.shape(node)
            inputs = self.atoms.new(shape[1], pinned=True)
            value = value_of([along(inputs, 1, len(shape))], shape)
            self.sources[node] = ()
        elif node.op == "output":
            self._finish(node)
            return
        elif node in self.trace.constants:
            return
        elif node.op == "get_attr":
            value = self.state_value(self.tensor(node))
        elif self.trace.shapes[node] is None:
            self._several(node)
            return
        else:
            value = self._rule(node)(self, node)
        self._note(node, value)

    def _several(self, node: Node) -> None:
        """A list of tensors (chunk, split, unbind): the parts are seen where they are picked."""
        if operation(node) not in LISTS:
            raise Refusal(f"the result of {self.what(node)} is not one tensor; takes chunk, split and unbind, "
                          "try to return one tensor")  # fmt: skip
        self._note_sources(node)

    def _note(self, node: Node, value: Value) -> None:
        self._note_sources(node)
        factors = [self.atoms.compressed(factor) for factor in value.factors]
        for factor in factors if node.op != "get_attr" else ():
            self.atoms.mark(factor)
        self.values[node] = Value(tuple(factors), value.shape, value.even)
        if value.shape != tuple(self.shape(node)):
            raise Refusal(f"{self.what(node)} makes {list(self.shape(node))}, its rule {list(value.shape)}")

    def _note_sources(self, node: Node) -> None:
        sources = tuple(source for source in node.all_input_nodes if source in self.sources)
        if sources:
            self.sources[node] = sources

    def _finish(self, node: Node) -> None:
        result = node.args[0]
        if not isinstance(result, Node):
            raise Refusal("the network has several outputs, or none; takes one tensor, try to return only that")
        if result not in self.sources:
            raise Refusal("the output does not depend on the input")
        shape = self.shape(result)
        if len(shape) < 2 or shape[0] != 1:
            raise WiringError(
                f"{place(result)}: the output is {list(shape)} for one sample: the batch dimension is lost; takes "
                "[n, classes, ...], try to keep the first dimension"
            )
        for factor in self.values[result].factors:
            self.atoms.pin(factor)

    def _rule(self, node: Node) -> Rule:
        modules = self.rules.modules
        if node.op != "call_module":
            rule = self.rules.functions.get(operation(node))
        else:
            rule = next((modules[kind] for kind in type(self.module(node)).__mro__ if kind in modules), None)
        if rule is None:
            raise Refusal(
                f"{self.what(node)} cannot be wired: whether it treats all channels alike is not known; takes convolutions, "
                "linear layers, norms, attention, pooling, element-wise functions and whatever moves entries; try to "
                "express it by these"
            )
        return rule

    def what(self, node: Node) -> str:
        """The operation of a node, for messages."""
        return type(self.module(node)).__name__ if node.op == "call_module" else operation(node)

    def module(self, node: Node) -> Any:
        """The module that a node calls."""
        return self.trace.graph.get_submodule(str(node.target))

    def shape(self, node: Node) -> torch.Size:
        """The shape of a node's tensor."""
        shape = self.trace.shapes[node]
        if shape is None:
            raise Refusal(f"{self.what(node)} is not one tensor")
        return shape

    def tensor(self, given: Any) -> Tensor:
        """The tensor of the state that an argument stands for; Refusal if it is computed."""
        if isinstance(given, Node) and given.op == "get_attr":
            owner, _, name = str(given.target).rpartition(".")
            given = getattr(self.trace.graph.get_submodule(owner), name)
        if not isinstance(given, Tensor):
            raise Refusal(f"the weight '{given}' is computed; takes parameters as they are, try a layer of their class")
        return given

    def of(self, given: Any) -> Value | None:
        """What is known of an argument; None for what is no tensor."""
        if isinstance(given, Node) and given in self.values:
            return self.values[given]
        given = self.trace.constants.get(given) if isinstance(given, Node) else given
        if not isinstance(given, Tensor):
            return None
        dims = range(given.ndim) if given.numel() else []
        alike = [dim for dim in dims if bool((given == given.narrow(dim, 0, 1)).all())]
        return value_of([], given.shape, alike)

    def known(self, given: Any) -> Value:
        """What is known of an argument that has to be a tensor."""
        value = self.of(given)
        if value is None:
            raise Refusal(f"takes a tensor, got {given}")
        return value

    def entries(self, tensor: Tensor, dim: int) -> Tensor:
        """The atoms of a dimension of a tensor of the state, [size]."""
        if id(tensor) not in self.names:
            raise Refusal(
                "has a weight that is not in the state dict but computed from it (a parametrization?); takes plain "
                "parameters, try to remove it first"
            )
        if (id(tensor), dim) not in self.slots:
            self.slots[id(tensor), dim] = self.atoms.new(tensor.shape[dim])
        return self.slots[id(tensor), dim]

    def state_value(self, tensor: Tensor) -> Value:
        """A tensor of the state used as it is: a factor for each dimension."""
        dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
        return value_of([along(self.entries(tensor, dim), dim, tensor.ndim) for dim in dims], tensor.shape)

    def group(self, members: Tensor, groups: Tensor) -> None:
        """The members' channels move with their groups; of one group that has them all nothing is said."""
        if len(groups.unique()) > 1:
            self.atoms.belong(members, groups)

    def layer(self, node: Node, kind: str, weight: Tensor | None, inputs: Tensor, outputs: Tensor) -> None:
        """Note a layer that reads these atoms and writes those."""
        if node not in self.layers:
            name = str(node.target) if node.op == "call_module" else ""
            if node.op != "call_module" and weight is not None:
                name = self.names[id(weight)][0].rpartition(".")[0]
            self.layers[node] = Found(name, kind, weight, inputs, outputs)

    def free(self, factor: Tensor) -> bool:
        """Whether some of the labels can move, as far as known by now."""
        return not self.atoms.is_pinned(factor)

    def settled(self, factor: Tensor, positions: Callable[[], Tensor]) -> Tensor:
        """The factor compressed, with an order among the entries of a channel that has several."""
        factor = self.atoms.compressed(factor)
        if not self.atoms.repeated(factor):
            return factor
        return self.atoms.compressed(self.atoms.ordered(factor, positions()))


def along(atoms: Tensor, dim: int, ndim: int) -> Tensor:
    """Labels [size] along one dimension of a tensor of `ndim`."""
    return atoms.view([-1 if place == dim % ndim else 1 for place in range(ndim)])


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a function's or method's call."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def linear_places(shape: tuple[int, ...], factor: Tensor) -> Tensor:
    """A number for each entry [shape] that tells those of one label apart."""
    loose = [1 if dim in varied(factor) else size for dim, size in enumerate(shape)]
    return torch.arange(prod(loose)).view(loose).expand(shape).contiguous()
