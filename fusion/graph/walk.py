"""Walk through a traced network and label each tensor, node by node, by the rules of the operations."""

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
    """The reason why a node cannot be wired. The caller adds the node and raises a WiringError."""


LISTS = ("chunk", "split", "unbind", "tensor_split")  # functions that return a list of tensors
Rule = Callable[["Walk", Node], Value]


@dataclass(frozen=True)
class Rules:
    """Rules that compute a node's labels from its operands: by module class (with subclasses), and by function name."""

    modules: Mapping[type, Rule]
    functions: Mapping[str, Rule]


@dataclass(frozen=True, eq=False)
class Found:
    """A layer with the atoms that it reads and writes, before the axes are known.

    Attributes:
        name: The layer's name.
        kind: Its kind, such as "conv", "linear" or "norm".
        weight: Its weight, or None.
        inputs: The atoms that it reads.
        outputs: The atoms that it writes.
    """

    name: str
    kind: str
    weight: Tensor | None
    inputs: Tensor
    outputs: Tensor


class Walk:
    """A walk through a network's nodes in order of execution, which gives each tensor a Value by its rule."""

    def __init__(self, network: nn.Module, example: Tensor, rules: Rules) -> None:
        if example.ndim < 2:
            raise WiringError(f"node 'input_1': an example of {list(example.shape)} must be [n, channels, ...]")
        self.trace = trace(network, example[:1])
        self.rules = rules
        self.names: dict[int, list[str]] = {}  # names of one tensor of the state, by id: a shared one has several
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
        self.reads: set[tuple[int, int]] = set()  # the slots that a layer reads
        self.blocks: dict[tuple[int, int], int] = {}  # slots of grouped convolutions: the number of groups
        self.blocks_of: dict[int, Tensor] = {}  # all inputs of a grouped convolution, by id of its weight

    def run(self) -> None:
        """Label all nodes. Raise WiringError for the first node without a matching rule."""
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
        """Note a list of tensors (chunk, split, unbind); its parts are labelled where they are selected."""
        if operation(node) not in LISTS:
            raise Refusal(f"the result of {self.what(node)} is not one tensor; use chunk, split or unbind, or "
                          "try to return one tensor")  # fmt: skip
        self._note_sources(node)

    def _note(self, node: Node, value: Value) -> None:
        self._note_sources(node)
        factors = [self.atoms.compressed(factor) for factor in value.factors]
        for factor in factors if node.op != "get_attr" else ():
            self.atoms.mark(factor)
        self.values[node] = Value(tuple(factors), value.shape, value.even)
        if value.shape != tuple(self.shape(node)):
            raise Refusal(f"{self.what(node)} returns {list(self.shape(node))}, but its rule {list(value.shape)}")

    def _note_sources(self, node: Node) -> None:
        sources = tuple(source for source in node.all_input_nodes if source in self.sources)
        if sources:
            self.sources[node] = sources

    def _finish(self, node: Node) -> None:
        result = node.args[0]
        if not isinstance(result, Node):
            raise Refusal("the network has several outputs, or none; return one tensor")
        if result not in self.sources:
            raise Refusal("the output does not depend on the input")
        shape = self.shape(result)
        if len(shape) < 2 or shape[0] != 1:
            raise WiringError(
                f"{place(result)}: the output is {list(shape)} for one sample: the batch dimension is lost; return "
                "[n, classes, ...]; try to keep the first dimension"
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
                f"{self.what(node)} cannot be wired: it may not treat all channels equally; use convolutions, "
                "linear layers, norms, attention, pooling, element-wise functions or moves of entries; try to "
                "express it by these"
            )
        return rule

    def what(self, node: Node) -> str:
        """Return the name of a node's operation, for messages."""
        return type(self.module(node)).__name__ if node.op == "call_module" else operation(node)

    def module(self, node: Node) -> Any:
        """Return the module that a node calls."""
        return self.trace.graph.get_submodule(str(node.target))

    def shape(self, node: Node) -> torch.Size:
        """Return the shape of a node's tensor."""
        shape = self.trace.shapes[node]
        if shape is None:
            raise Refusal(f"{self.what(node)} is not one tensor")
        return shape

    def tensor(self, source: Any) -> Tensor:
        """Return the tensor of the state that an argument refers to. Raise Refusal if it is computed."""
        if isinstance(source, Node) and source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            source = getattr(self.trace.graph.get_submodule(owner), name)
        if not isinstance(source, Tensor):
            raise Refusal(f"the weight '{source}' is computed; use unchanged parameters; try a layer of their class")
        return source

    def of(self, source: Any) -> Value | None:
        """Return the labels of a node's argument; a constant has no atoms. Return None if it is not a tensor."""
        if isinstance(source, Node) and source in self.values:
            return self.values[source]
        source = self.trace.constants.get(source) if isinstance(source, Node) else source
        if not isinstance(source, Tensor):
            return None
        dims = range(source.ndim) if source.numel() else []
        even_dims = [dim for dim in dims if bool((source == source.narrow(dim, 0, 1)).all())]
        return value_of([], source.shape, even_dims)

    def known(self, source: Any) -> Value:
        """Return the labels of an argument that must be a tensor."""
        value = self.of(source)
        if value is None:
            raise Refusal(f"must be a tensor, not {source}")
        return value

    def entries(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the atoms of a dimension of a tensor of the state, [size]."""
        if id(tensor) not in self.names:
            raise Refusal(
                "has a weight that is not in the state dict but computed from it (a parametrization?); use plain "
                "parameters; try to remove it first"
            )
        if (id(tensor), dim) not in self.slots:
            self.slots[id(tensor), dim] = self.atoms.new(tensor.shape[dim])
        return self.slots[id(tensor), dim]

    def state_value(self, tensor: Tensor) -> Value:
        """Return the labels of a tensor of the state: a factor for each dimension."""
        dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
        return value_of([along(self.entries(tensor, dim), dim, tensor.ndim) for dim in dims], tensor.shape)

    def group(self, members: Tensor, groups: Tensor) -> None:
        """Record that the members' channels move with their groups; a single group with all members has no effect."""
        if len(groups.unique()) > 1:
            self.atoms.belong(members, groups)

    def layer(self, node: Node, kind: str, weight: Tensor | None, inputs: Tensor, outputs: Tensor) -> None:
        """Record that a node calls a layer, which reads the atoms `inputs` and writes `outputs`."""
        if node not in self.layers:
            name = str(node.target) if node.op == "call_module" else ""
            if node.op != "call_module" and weight is not None:
                name = self.names[id(weight)][0].rpartition(".")[0]
            self.layers[node] = Found(name, kind, weight, inputs, outputs)

    def free(self, factor: Tensor) -> bool:
        """Return whether some channel in the factor can move, as far as known now."""
        return not self.atoms.is_pinned(factor)

    def compressed(self, factor: Tensor, positions: Callable[[], Tensor]) -> Tensor:
        """Return a factor in its smallest form (`Atoms.compressed`).

        If a channel has several entries in the factor, each entry first gets its own atom.

        Args:
            factor: The atoms of a tensor's entries.
            positions: Returns numbers that order the entries of one channel. It is called only if they are needed.
        """
        factor = self.atoms.compressed(factor)
        if not self.atoms.repeated(factor):
            return factor
        return self.atoms.compressed(self.atoms.ordered(factor, positions()))


def along(atoms: Tensor, dim: int, ndim: int) -> Tensor:
    """Return atoms [size] as a factor of `ndim` dimensions that varies along `dim` only."""
    return atoms.view([-1 if index == dim % ndim else 1 for index in range(ndim)])


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a node's call, by position or name; `default` if it is not there."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def linear_places(shape: tuple[int, ...], factor: Tensor) -> Tensor:
    """Return numbers [shape] that differ between entries that have equal labels in the factor."""
    loose = [1 if dim in varied(factor) else size for dim, size in enumerate(shape)]
    return torch.arange(prod(loose)).view(loose).expand(shape).contiguous()
