"""Which layers of a network can be refitted, in which order, and which node has the target of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.graph.tracing import CONVOLUTIONS, NORMS, TRANSPOSED, operation
from fedloom.fusion.state import BATCH_NORM

PLAIN = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)  # exactly these classes: their outputs are linear in their weights
SUMS, PASSED = ("add",), ("dropout", "dropout1d", "dropout2d", "dropout3d", "stochastic_depth", "contiguous")
PASSED_MODULES = (nn.Identity, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class Fit:
    """One layer to refit.

    Attributes:
        node: The node of its call.
        name: The name of its module.
        norm: The name of the BatchNorm after it, refitted with it; "" for none.
        end: The node with the target: of the layer, of that norm, or of the sum that ends there.
        other: The sum's other operand; "" for none.
    """

    node: str
    name: str
    norm: str
    end: str
    other: str = ""


def fits(wiring: Wiring) -> dict[str, Fit]:
    """Return by node the Fit of each layer that is linear in its weights and called once, and of norms not after one.

    If the outputs of two such layers are added, the one on the shorter path (a shortcut's) is fitted to its own target.
    The other one is fitted to the sum's target.
    """
    work = _Fits(wiring)
    by_node = {fit.node: fit for layer in wiring.layers if (fit := work.of(layer.node)) is not None}
    by_node = {node: fit for node, fit in by_node.items() if work.is_plain(fit)}
    ends: dict[str, list[str]] = {}
    for fit in by_node.values():
        if fit.other:
            ends.setdefault(fit.end, []).append(fit.node)
    for nodes in ends.values():
        for shortcut in sorted(nodes, key=work.depth)[: len(nodes) - 1]:
            by_node[shortcut] = work.of(shortcut, at_sum=False) or by_node[shortcut]
    return by_node


class _Fits:
    def __init__(self, wiring: Wiring) -> None:
        self.wiring, self.graph = wiring, wiring.graph
        self.nodes = {node.name: node for node in wiring.graph.graph.nodes}
        self.calls = [node.target for node in self.nodes.values() if node.op == "call_module"]
        self.folded: set[str] = set()  # nodes of norms that are refitted with a layer

    def of(self, name: str, at_sum: bool = True) -> Fit | None:
        node = self.nodes[name]
        if node.op != "call_module" or self.calls.count(node.target) > 1 or name in self.folded:
            return None
        module = self.graph.get_submodule(str(node.target))
        if isinstance(module, NORMS):
            return Fit(name, str(node.target), "", name) if getattr(module, "weight", None) is not None else None
        if type(module) not in PLAIN:
            return None
        end, norm = node, ""
        user = self._only_user(node)
        if user is not None and user.op == "call_module" and self.calls.count(user.target) == 1:
            behind = self.graph.get_submodule(str(user.target))
            if isinstance(behind, BATCH_NORM) and behind.running_var is not None:
                end, norm = user, str(user.target)
                self.folded.add(user.name)
        total, other = self._sum(end) if at_sum else (None, "")
        return Fit(name, str(node.target), norm, end.name if total is None else total.name, other)

    def is_plain(self, fit: Fit) -> bool:
        """Return whether the channels at `end` are those that the layer writes, in one dimension."""
        layout, module = self.wiring.layouts.get(fit.end), self.graph.get_submodule(fit.name)
        if layout is None or layout.others or fit.end in self.wiring.still:
            return False
        shape = next(layer.shape for layer in self.wiring.layers if layer.node == fit.node)
        return isinstance(module, NORMS) or layout.dims == ((len(shape),) if isinstance(module, nn.Linear) else (1,))

    def depth(self, name: str) -> int:
        """Return the number of layers on the way to a node."""
        seen, waiting = set(), [self.nodes[name]]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return sum(node.op == "call_module" for node in seen)

    def _sum(self, end: Node) -> tuple[Node | None, str]:
        """Return the sum that takes `end`, possibly through nodes without effect in eval mode, and its other operand."""
        while (user := self._only_user(end)) is not None and self._passes(user):
            end = user
        if user is None or user.op == "call_module" or operation(user) not in SUMS or user.kwargs:
            return None, ""
        others = [arg for arg in user.args if isinstance(arg, Node) and arg is not end]
        if len(user.args) != 2 or len(others) != 1 or others[0].op == "get_attr":
            return None, ""
        dims = self._dims(end)
        same = bool(dims) and self._dims(others[0]) == self._dims(user) == dims
        return (user, others[0].name) if same else (None, "")

    def _dims(self, node: Node) -> Sequence[int]:
        layout = self.wiring.layouts.get(node.name)
        return () if layout is None else layout.dims

    def _passes(self, node: Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.graph.get_submodule(str(node.target)), PASSED_MODULES)
        return operation(node) in PASSED

    def _only_user(self, node: Node) -> Node | None:
        users = list(node.users)
        return users[0] if len(users) == 1 else None
