"""Find the activation that the values of a node pass before they are read."""

from collections.abc import Callable
from operator import methodcaller

from torch import Tensor, fx, nn

from fedloom.fusion.graph.tracing import operation

MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Tanh, nn.Hardtanh),
)
FUNCTIONS = frozenset(("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid",
                       "hardsigmoid", "hardswish", "tanh", "hardtanh"))  # fmt: skip


def activation_behind(graph: fx.GraphModule, name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return the name and function of the activation that reads node `name`; without one, `name` and the identity."""
    node = next(node for node in graph.graph.nodes if node.name == name)
    match = next(((user, call) for user in node.users if (call := _call(graph, node, user)) is not None), None)
    return (name, lambda values: values) if match is None else (match[0].name, lambda values: match[1](values.clone()))


def _call(graph: fx.GraphModule, node: fx.Node, user: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """Return the function of a node's user, if it is an activation."""
    if user.op == "call_module":
        module = graph.get_submodule(str(user.target))
        return module if isinstance(module, MODULES) else None
    if operation(user) not in FUNCTIONS or user.args[:1] != (node,):
        return None
    if user.op == "call_method":
        return methodcaller(str(user.target), *user.args[1:], **user.kwargs)
    assert callable(user.target)
    function = user.target
    return lambda values: function(values, *user.args[1:], **user.kwargs)
