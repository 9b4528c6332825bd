"""The activation that the values of a node go through before they are read."""

from collections.abc import Callable

from torch import Tensor, fx, nn

from fusion.tracing import operation

MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Tanh, nn.Hardtanh),
)
FUNCTIONS = frozenset(("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid",
                       "hardsigmoid", "hardswish", "tanh", "hardtanh"))  # fmt: skip


def activation_behind(graph: fx.GraphModule, name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The node of the activation that reads a node, and what it does, entry by entry; the node itself if there is none."""
    node = next(node for node in graph.graph.nodes if node.name == name)
    for user in node.users:
        if user.op == "call_module" and isinstance(module := graph.get_submodule(str(user.target)), MODULES):
            return user.name, lambda values: module(values.clone())
        if user.op == "call_function" and operation(user) in FUNCTIONS and user.args[:1] == (node,):
            return user.name, lambda values: _applied(user, values)
        if user.op == "call_method" and operation(user) in FUNCTIONS:
            return user.name, lambda values: getattr(values.clone(), str(user.target))()
    return name, lambda values: values


def _applied(node: fx.Node, values: Tensor) -> Tensor:
    assert callable(node.target)
    return node.target(values.clone(), *node.args[1:], **node.kwargs)
