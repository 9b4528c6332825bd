"""Plans as in the public code of OTFusion and CLAFusion: one for each layer, whose inputs move by the plan before.

This is for comparison, with its faults. In residual networks, every layer of a stream has its own plan: a skip's
values and what they are added to are in different bases. Column sums scale activations at unequal widths. Outputs
move, too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.fusion.cla_ot.moves import Moves
from fedloom.fusion.cla_ot.transport import Plan
from fedloom.fusion.graph.channels import Layer, Wiring


def sequential_moves(wiring: Wiring, plans: Mapping[str, Plan]) -> Moves:
    """Return Moves from one plan for each convolution and linear layer, by name; inputs move by the plan before."""
    layers = [layer for layer in wiring.layers if layer.kind != "norm"]
    incoming: dict[str, Tensor] = {}
    outgoing = {name: plan.outgoing for name, plan in plans.items()}
    before: Tensor | None = None  # the plan of the layer before
    skip, residual, shortcut = None, None, -2
    for index, layer in enumerate(layers):
        if before is not None and layer.kind == "conv":
            if _changes_shape(wiring, layer):
                if _kernel(wiring, layer) == 1:  # a shortcut reads the input of the block
                    residual, shortcut, before = before, index, skip
                else:
                    skip = before
            elif shortcut == index - 1 and residual is not None:
                before = (before + residual) / 2
        if before is not None:
            incoming[layer.name] = before
        before = outgoing[layer.name]
    for layer in wiring.layers:  # a norm moves with the layer before it
        if layer.kind == "norm":
            owner = [each for each in layers if each.outputs == layer.outputs and _earlier(wiring, each, layer)]
            if owner:
                outgoing[layer.name] = outgoing[owner[-1].name]
    return Moves(outgoing, incoming, {name: plan.cost for name, plan in plans.items()})


def _changes_shape(wiring: Wiring, layer: Layer) -> bool:
    stride = getattr(wiring.graph.get_submodule(layer.name), "stride", (1,))
    return max(stride) > 1 or wiring.axes[layer.inputs].size != wiring.axes[layer.outputs].size


def _kernel(wiring: Wiring, layer: Layer) -> int:
    return int(torch.tensor(wiring.graph.get_submodule(layer.name).get_parameter("weight").shape[2:]).prod())


def _earlier(wiring: Wiring, one: Layer, other: Layer) -> bool:
    order = [node.name for node in wiring.graph.graph.nodes]
    return order.index(one.node) < order.index(other.node)
