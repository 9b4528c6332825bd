"""From what two networks of one structure do, or from their weights, to the moves that bring one into the other's basis."""

from collections.abc import Mapping

from torch import Tensor, nn

from conf.errors import UserError
from fusion.channels import Layer, Wiring
from fusion.reference import sequential_moves
from fusion.transport import GROUNDS, Moves, Plan, TransportSettings, apply, neutral_plan, solve

Body = tuple[nn.Module, Mapping[str, Tensor]]  # a network of the structure, and the values [channels, n] of its nodes


def axis_moves(structure: Wiring, body: Body, into: Body, settings: TransportSettings, basis: str) -> Moves:
    """One plan for each axis but the input's and the output's, from all the pre-activations that lie on it.

    With `basis` "weights" from the first layer that writes the axis. The inside of a block that one of them lacks has
    nothing to compare. Raises UserError, naming the layer, for pre-activations of different resolution and plans that cannot
    be made.
    """
    plans: dict[int, Plan] = {}
    for layer in _writers(structure):
        axis = structure.axes[layer.outputs]
        if axis.fixed or axis.index in plans:
            continue
        if basis == "weights":
            pairs = _rows(layer, body, into, plans)
        else:
            nodes = [node for node in structure.points[axis.index] if node in body[1] and node in into[1]]
            pairs = [(body[1][node], into[1][node]) for node in nodes]
        importance = _importance(body, layer), _importance(into, layer)
        if not pairs:
            plans[axis.index] = neutral_plan(len(importance[0]), len(importance[1]), settings.normalisation)
            continue
        for one, other in pairs:
            if one.shape[1] != other.shape[1]:
                raise UserError(f"layer '{layer.name}': {one.shape[1]} values of a channel here, {other.shape[1]} there: "
                                "the networks work at different resolutions")  # fmt: skip
        plans[axis.index] = _solved(layer, pairs, settings, importance, axis.groups)
    return _of_axes(structure, plans)


def layer_moves(structure: Wiring, body: Body, into: Body, settings: TransportSettings, basis: str) -> Moves:
    """One plan for each layer, the output's too, from its own outputs: the public code (fusion.reference)."""
    if basis == "weights":
        raise UserError("sequential plans are made from activations; use basis='activations', or sequential=False")
    if any(layer.kind == "depthwise" for layer in structure.layers):
        raise UserError("sequential plans know no depthwise convolutions; use sequential=False")
    plans = {}
    for layer in _writers(structure):
        importance = _importance(body, layer), _importance(into, layer)
        pairs = [(body[1][layer.node], into[1][layer.node])]
        plans[layer.name] = _solved(layer, pairs, settings, importance)
    return sequential_moves(structure, plans)


def _solved(
    layer: Layer,
    pairs: list[tuple[Tensor, Tensor]],
    settings: TransportSettings,
    importance: tuple[Tensor, Tensor],
    groups: int = 1,
) -> Plan:
    """The plan between channels that the layer writes; errors name it."""
    try:
        return solve(GROUNDS[settings.ground](pairs), settings, groups=groups, importance=importance)
    except UserError as error:
        raise UserError(f"layer '{layer.name}': {error}") from error


def _of_axes(structure: Wiring, plans: Mapping[int, Plan]) -> Moves:
    outgoing = {layer.name: plans[layer.outputs].outgoing for layer in structure.layers if layer.outputs in plans}
    incoming = {layer.name: plans[layer.inputs].incoming for layer in structure.layers if layer.inputs in plans}
    costs = {layer.name: plans[layer.outputs].cost for layer in _writers(structure) if layer.outputs in plans}
    return Moves(outgoing, incoming, costs)


def _writers(structure: Wiring) -> list[Layer]:
    return [layer for layer in structure.layers if layer.kind in ("conv", "linear")]


def _weight(body: Body, layer: Layer) -> Tensor:
    return body[0].get_parameter(f"{layer.name}.weight").detach()


def _importance(body: Body, layer: Layer) -> Tensor:
    """The norm of each channel's incoming weights, [channels]."""
    return _weight(body, layer).flatten(1).norm(dim=1)


def _rows(layer: Layer, body: Body, into: Body, plans: Mapping[int, Plan]) -> list[tuple[Tensor, Tensor]]:
    """Weights of both networks as vectors of their output channels, the inputs in one basis; none for zero weights."""
    own, other = _weight(body, layer), _weight(into, layer)
    if not own.any() or not other.any():
        return []
    if layer.inputs in plans:
        own = apply(own, plans[layer.inputs].incoming, 1, f"{layer.name}.weight")
    return [(own.flatten(1), other.flatten(1))]
