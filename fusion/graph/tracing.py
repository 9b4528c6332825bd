"""Trace a network with torch.fx, with shapes and source lines."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.fusion.graph.expressions import FUNCTIONS, MODULES
from fedloom.fusion.graph.undisturbed import undisturbed

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LEAVES = (*NORMS, *CONVOLUTIONS, *TRANSPOSED, nn.Linear, nn.PReLU)  # with their subclasses: never traced into
OPEN = (nn.LayerNorm, nn.RMSNorm)  # except subclasses of these that rearrange their input first
CONSTANTS = frozenset(  # functions whose result depends on a tensor's shape, but not on its values
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_tensor", "shift_mask")
)

_OWN = os.path.abspath(__file__)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class WiringError(UserError):
    """The error for a network that cannot be wired. The message has the fx node or module, the source line and reason."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a network.

    Attributes:
        graph: The traced network.
        shapes: The shape of each node's tensor in one run; None if the node's value is not a tensor.
        constants: The results of nodes that depend on neither the input's values nor the state.
    """

    graph: fx.GraphModule
    shapes: Mapping[Node, torch.Size | None]
    constants: Mapping[Node, Any]


def place(node: Node) -> str:
    """Return a node's origin: its name, module path and source line, as far as known."""
    module, line = node.meta.get("module"), node.meta.get("line")
    return f"node '{node.name}'" + (f" of module '{module}'" if module else "") + (f" ({line})" if line else "")


def trace(network: nn.Module, example: Tensor) -> Trace:
    """Trace `network` in eval mode and run it once on `example`. Attributes and buffers of its modules stay unchanged.

    Raise WiringError if torch.fx cannot trace the network (control flow depends on data), or it does not run.
    """
    with undisturbed(network), torch.no_grad():
        _set_evaluating(network)
        tracer = _Tracer()
        own = set(vars(network))
        try:
            graph = fx.GraphModule(network, tracer.trace(network))
        except Exception as error:
            raise WiringError(
                f"{_origin(network, tracer, error)} cannot be traced: {_one_line(error)}; the control flow of forward must "
                "not depend on data; try to move such code out of the network"
            ) from error
        constants = set(vars(network)) - own  # torch.fx leaves them behind
        graph._non_persistent_buffers_set |= constants
        run = _Run(graph, f"[{', '.join(['k', *map(str, example.shape[1:])])}]")
        run.run(example.clone())
    graph.training = network.training
    return Trace(graph, run.shapes, run.constants)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set eval mode inside the context, by flags alone, because train() can be overridden. Restore attributes after it."""
    with undisturbed(network, structure=False):
        _set_evaluating(network)
        yield


def _set_evaluating(network: nn.Module) -> None:
    for module in network.modules():
        module.training = False


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
    """Return the path relative to the current folder, if it is inside."""
    return name.removeprefix(os.getcwd() + os.sep)


def _is_user_file(name: str) -> bool:
    return not name.startswith((_TORCH, "<")) and name != _OWN


class _Tracer(fx.Tracer):
    """Leaves layers whole, records module path and source line of each node, and leaves default arguments unchanged."""

    failed = ""  # path of the innermost module whose trace failed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if _expression(m) or any(isinstance(m, kind) and type(m).forward is not kind.forward for kind in OPEN):
            return False
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        other = _expression(m)
        try:
            return super().call_module(m, partial(other, m) if other else forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta |= {"module": self.scope.module_path, "line": _user_line(sys._getframe(1))}
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        known = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
        if kind == "call_function" and known in FUNCTIONS:
            return FUNCTIONS[known](*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **more)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        other = _expression(self.root) if isinstance(self.root, nn.Module) else None
        return other or root_fn, [self.root, self.create_proxy("placeholder", "input", (), {})]


def _expression(module: nn.Module) -> Callable[..., Any] | None:
    """Return the expression that replaces a module's forward in the trace, if the forward is not overridden."""
    return next((MODULES[kind] for kind in MODULES if type(module).forward is kind.forward), None)


def _user_line(frame: FrameType | None) -> str:
    """Return file:line of the innermost frame outside of torch and of `trace`'s callers, or ""."""
    while frame is not None and frame.f_code is not trace.__code__:
        if _is_user_file(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Run(fx.Interpreter):
    """Runs the graph, and stores shapes and constants."""

    def __init__(self, graph: fx.GraphModule, inputs: str) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.inputs = inputs  # their shape, for errors
        self.shapes: dict[Node, torch.Size | None] = {}
        self.constants: dict[Node, Any] = {}
        self.state = {id(tensor) for tensor in graph.state_dict(keep_vars=True).values() if tensor.is_floating_point()}

    def run_node(self, n: Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception as error:
            raise WiringError(f"{place(n)} does not run on inputs of the shape {self.inputs}{self._takes(n)} "
                              f"({_one_line(error)})") from error  # fmt: skip
        self.shapes[n] = result.shape if isinstance(result, Tensor) else None
        if self._is_constant(n, result):
            self.constants[n] = result
        return result

    def _takes(self, node: Node) -> str:
        """Return what the layer of a node takes, as the continuation of an error; empty if that is not known."""
        layer = self.submodules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Linear):
            return f": it takes {count(layer.in_features, 'feature')}"
        return f": it takes {count(layer.in_channels, 'channel')}" if isinstance(layer, CONVOLUTIONS + TRANSPOSED) else ""

    def _is_constant(self, node: Node, result: Any) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return node.op == "get_attr" and id(result) not in self.state
        if node.op == "call_module" and self.submodules[str(node.target)].state_dict():
            return False
        parts = result if isinstance(result, list | tuple) else [result]
        if not any(isinstance(part, Tensor) for part in parts) or operation(node) in CONSTANTS:
            return node.op != "output"
        return all(source in self.constants for source in node.all_input_nodes)


def operation(node: Node) -> str:
    """Return the name of the function or method that a node calls; in-place variants get the same name."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}.get(name, name).rstrip("_")
