"""Trace of a network with torch.fx, with shapes and source lines, and the union-find of the axes of its tensors."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from conf.errors import UserError
from fusion.units import Layer

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LEAVES = (*NORMS, *CONVOLUTIONS, nn.Linear, nn.PReLU)  # and their subclasses: never traced into

_OWN = os.path.abspath(__file__)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class WiringError(UserError):
    """A network whose wiring cannot be derived: names the fx node or module, the source line if known, and why."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph of a network and the shape of each node's tensor in one run; None for what is no tensor."""

    graph: fx.GraphModule
    shapes: Mapping[Node, torch.Size | None]


def place(node: Node) -> str:
    """Where a node comes from: its name, module path and source line, as far as known."""
    module, line = node.meta.get("module"), node.meta.get("line")
    return f"node '{node.name}'" + (f" of module '{module}'" if module else "") + (f" ({line})" if line else "")


def trace(network: nn.Module, example: Tensor) -> Trace:
    """Trace `network` in eval mode and run it once on `example`; flags and buffers stay as they are.

    Raises WiringError for what torch.fx cannot trace (control flow that depends on data) and what does not run.
    """
    with evaluating(network), torch.no_grad():
        tracer = _Tracer()
        try:
            graph = fx.GraphModule(network, tracer.trace(network))
        except Exception as error:
            raise WiringError(f"{_origin(network, tracer, error)} cannot be traced: {_one_line(error)}") from error
        run = _Run(graph)
        run.run(example.clone())
    graph.training = network.training
    return Trace(graph, run.shapes)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Eval mode for the time being; by the flags alone, since train() may be overridden."""
    flags = [(module, module.training) for module in network.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _origin(network: nn.Module, tracer: "_Tracer", error: Exception) -> str:
    lines = [
        f"{_short(frame.filename)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_user_file(frame.filename)
    ]
    path = tracer.failed or type(network).__name__
    return f"module '{path}'" + (f" ({lines[-1]})" if lines else "")


def _short(name: str) -> str:
    """Relative to the current folder, if it is inside."""
    return name.removeprefix(os.getcwd() + os.sep)


def _is_user_file(name: str) -> bool:
    return not name.startswith((_TORCH, "<")) and name != _OWN


class _Tracer(fx.Tracer):
    """Keeps layers whole, notes module path and source line of each node, leaves default arguments at their values."""

    failed = ""  # path of the innermost module whose trace failed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta |= {"module": self.scope.module_path, "line": _user_line(sys._getframe(1))}
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        return root_fn, [self.root, self.create_proxy("placeholder", "input", (), {})]


def _user_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame that is neither torch's nor the caller of `trace`; "" if there is none."""
    while frame is not None and frame.f_code is not trace.__code__:
        if _is_user_file(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Run(fx.Interpreter):
    """Runs the graph and keeps the shapes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.shapes: dict[Node, torch.Size | None] = {}

    def run_node(self, n: Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception as error:
            raise WiringError(f"{place(n)} does not run: {_one_line(error)}") from error
        self.shapes[n] = result.shape if isinstance(result, Tensor) else None
        return result


@dataclass(frozen=True)
class Value:
    """The channel dimension (dim 1) of a node's tensor, or a dimension of a weight.

    Channel k of the axis has the entries k * repeat to (k + 1) * repeat - 1.
    """

    axis: int
    repeat: int = 1


class Refusal(ValueError):
    """Why a node cannot be wired; whoever knows the node makes a WiringError of it."""


class Ties:
    """Axes by union-find, with the dimensions of the state's tensors that lie on them."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.names: dict[int, list[str]] = {}  # of one tensor, by id: a shared one has several
        for name, tensor in state.items():
            self.names.setdefault(id(tensor), []).append(name)
        self.slots: dict[tuple[int, int], Value] = {}  # (id of tensor, dim)
        self.sizes: list[int] = []
        self._parents: list[int] = []

    def new(self, size: int) -> Value:
        """A new axis of `size` channels."""
        self._parents.append(len(self._parents))
        self.sizes.append(size)
        return Value(len(self._parents) - 1)

    def find(self, axis: int) -> int:
        """The representative of an axis: the oldest one that it is tied to."""
        while self._parents[axis] != axis:
            self._parents[axis] = axis = self._parents[self._parents[axis]]
        return axis

    def tie(self, first: Value, second: Value) -> None:
        """Make two axes one; Refusal if their channels do not correspond one to one."""
        one, other = ((self.sizes[value.axis], value.repeat) for value in (first, second))
        if one != other:
            raise Refusal("ties {} channels of {} entries to {} channels of {}".format(*one, *other))
        low, high = sorted((self.find(first.axis), self.find(second.axis)))
        self._parents[high] = low

    def slot(self, tensor: Tensor | None, dim: int, value: Value) -> None:
        """Put a dimension of a tensor of the state on an axis; None is skipped."""
        if tensor is None:
            return
        if id(tensor) not in self.names:
            raise Refusal("has a weight that is not in the state dict but computed from it (a parametrization?)")
        if tensor.shape[dim] != self.sizes[value.axis] * value.repeat:
            raise Refusal(f"has {tensor.shape[dim]} entries for {self.sizes[value.axis]} channels of {value.repeat}")
        self.tie(self.slots.setdefault((id(tensor), dim), value), value)

    def roots(self) -> list[int]:
        """The representatives, oldest first."""
        return [axis for axis, parent in enumerate(self._parents) if axis == parent]


Rule = Callable[["Walk", Node], Value]


@dataclass(frozen=True)
class Rules:
    """How the channels of a node follow from those of its operands: by class of module (subclasses follow suit) and by
    name of function or method; questions: functions whose results are no tensors and tie nothing."""

    modules: Mapping[type, Rule]
    functions: Mapping[str, Rule]
    questions: frozenset[str]


class Walk:
    """Goes through the nodes in order of execution and gives each tensor with channels a Value, by its rule."""

    def __init__(self, network: nn.Module, example: Tensor, rules: Rules) -> None:
        self.trace = trace(network, example)
        self.rules = rules
        self.batch = example.shape[0]
        self.ties = Ties(network.state_dict(keep_vars=True))
        self.values: dict[Node, Value] = {}
        self.sources: dict[Node, tuple[Node, ...]] = {}
        self.layers: dict[Node, Layer] = {}  # with axes not yet numbered
        self.sums: list[Node] = []
        self.softmax: list[Node] = []
        self.groups: dict[Node, int] = {}  # of norms that restrict the permutations
        self.ends: list[int] = []  # axes of input and output

    def run(self) -> None:
        """Raises WiringError for the first node that no rule fits."""
        for node in self.trace.graph.graph.nodes:
            try:
                self._step(node)
            except Refusal as error:
                raise WiringError(f"{place(node)}: {error}") from error

    def _step(self, node: Node) -> None:
        sources = tuple(source for source in node.all_input_nodes if source in self.values)
        if node.op == "placeholder":
            if len(self.shape(node)) < 2:
                raise Refusal(f"an example of {list(self.shape(node))}, takes [n, channels, ...]")
            value = self.ties.new(self.shape(node)[1])
            self.ends.append(value.axis)
        elif node.op == "output":
            self._finish(node)
            return
        elif not sources or (self.trace.shapes[node] is None and operation(node) in self.rules.questions):
            return
        elif self.trace.shapes[node] is None:
            raise Refusal(f"the result of {self.what(node)} is not one tensor")
        else:
            value = self._rule(node)(self, node)
        self.values[node], self.sources[node] = value, sources
        shape = self.shape(node)
        if len(shape) < 2 or (shape[0], shape[1]) != (self.batch, self.ties.sizes[value.axis] * value.repeat):
            raise Refusal(f"{self.what(node)} makes {list(shape)}, which is not [n, channels, ...]")

    def _finish(self, node: Node) -> None:
        result = node.args[0]
        if not isinstance(result, Node):
            raise Refusal("the network has several outputs, or none")
        if result not in self.values:
            raise Refusal("the output does not depend on the input channel by channel")
        self.ends.append(self.values[result].axis)

    def _rule(self, node: Node) -> "Rule":
        modules = self.rules.modules
        if node.op != "call_module":
            rule = self.rules.functions.get(operation(node))
        else:
            rule = next((modules[kind] for kind in type(self.module(node)).__mro__ if kind in modules), None)
        if rule is None:
            raise Refusal(f"{self.what(node)} cannot be wired")
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
        assert shape is not None
        return shape

    def only(self, node: Node) -> tuple[Node, Value]:
        """The node's one operand with channels; Refusal if there are more, or other tensors of several entries."""
        for other in node.all_input_nodes:
            if other not in self.values and prod(self.trace.shapes[other] or ()) > 1:
                raise Refusal(f"{self.what(node)} with '{other.name}', a tensor outside convolution, linear and norm layers")
        operands = [other for other in node.all_input_nodes if other in self.values]
        if len(operands) > 1:
            raise Refusal(f"{self.what(node)} of several tensors ({', '.join(map(str, operands))}) cannot be wired")
        return operands[0], self.values[operands[0]]

    def layer(self, node: Node, kind: str, inputs: Value, outputs: Value) -> Value:
        """Note a layer; returns its outputs."""
        name, shape = str(node.target), tuple(self.shape(node)[1:])
        self.layers[node] = Layer(name, kind, node.name, inputs.axis, outputs.axis, shape)
        return outputs


def operation(node: Node) -> str:
    """The name of a function or method; in-place ones like the others."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}.get(name, name).rstrip("_")
