"""What comparators share: networks of one structure, the inputs and outputs of layers, least squares."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import Moves, moved
from fedloom.fusion.cla_ot.repair import Target, in_basis, mixture, repair, running, watched
from fedloom.fusion.graph.channels import Layer, Wiring, wire
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.probe import Runner, observe
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import State

ROWS = 20_000  # observed positions of a layer, over all samples
RIDGE, FLOOR = 1e-2, 1e-3  # relative to the diagonal, and to its mean


@dataclass(frozen=True, eq=False)
class Frame:
    """Networks that `fuse` has brought to one depth, each with its channels in its own order.

    Attributes:
        bodies: The networks.
        wirings: The wiring of each network.
        into: The index of the network to whose channels the others are aligned.
        depth: The index of the network that sets the layers.
        probe: Images [n, c, h, w].
        plans: For each network, by axis, [n, m] from its channels to those of `into`; columns sum to 1. Empty for `into`.
        shares: By layer name, each network's share in the mean; 0 where the layer was added.
    """

    bodies: tuple[nn.Module, ...]
    wirings: tuple[Wiring, ...]
    into: int
    depth: int
    probe: Tensor
    plans: tuple[Mapping[int, Tensor], ...]
    shares: Mapping[str, list[float]]

    @property
    def structure(self) -> Wiring:
        """The layers and axes (channels of several layers that move as one) that all the networks have."""
        return self.wirings[self.depth]

    def size(self, axis: int) -> int:
        """Return the number of channels on an axis of the result."""
        return self.wirings[self.into].axes[axis].size

    def averaged(self, moves: Sequence[Moves], shares: Mapping[str, list[float]]) -> nn.Module:
        """Return the mean of the networks after their `moves`, weighted by `shares` in each layer, without repair."""
        states = [self.moved(index, move) for index, move in enumerate(moves)]
        return with_state(self.bodies[self.into], {name: _mean(name, states, shares) for name in states[self.into]})

    def repaired(self, network: nn.Module, moves: Sequence[Moves], shares: Mapping[str, list[float]]) -> nn.Module:
        """Set a network's statistics in place to the mixture of the moved networks' (REPAIR); return the network."""
        seen, own = [], []
        for wiring, move in zip(self.wirings, moves, strict=True):
            nodes = watched(wiring)
            moments = observe(wiring, self.probe, moments=set(nodes.values())).moments
            seen.append(
                in_basis({name: (moments[node].mean, moments[node].std) for name, node in nodes.items()}, move.outgoing)
            )
            statistics = {name: running(wiring.graph.get_submodule(name)) for name in nodes}
            own.append(in_basis({name: pair for name, pair in statistics.items() if pair}, move.outgoing))
        repair(network, Target(mixture(seen, shares), mixture(own, shares)), self.probe)
        return network

    def by_layer(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Moves:
        """Return matrices [n, m] by axis, for outgoing and incoming channels, as Moves by layer."""
        layers = self.structure.layers
        return Moves({layer.name: outgoing[layer.outputs] for layer in layers if layer.outputs in outgoing},
                     {layer.name: incoming[layer.inputs] for layer in layers if layer.inputs in incoming}, {})  # fmt: skip

    def by_plans(self) -> list[Moves]:
        """Return the moves of each network's channels to those of `into`, by its plans."""
        return [self.by_layer(plans, {axis: spread(plan) for axis, plan in plans.items()}) for plans in self.plans]

    def moved(self, index: int, move: Moves) -> State:
        """Return the state of network `index` after a move of channels: weights on both sides, vectors with the outputs."""
        return moved(self.bodies[index].state_dict(), self.structure.layers, move)

    def fold(self) -> None:
        """Make all BatchNorms neutral, in place: fold their scale and shift into the layers before them.

        Raise UserError as `norms`.
        """
        for body in self.bodies:
            for name, norm in norms(self.structure, body).items():
                if norm:
                    _fold(body.get_submodule(name), body.get_submodule(norm))


def _fold(module: Any, norm: Any) -> None:
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = -norm.running_mean if module.bias is None else module.bias - norm.running_mean
    written(module, norm, torch.cat([module.weight.flatten(1).T * scale, (scale * bias + norm.bias)[None]]))


def written(module: Any, norm: Any | None, solution: Tensor) -> None:
    """Write `solution` [d (+ 1), m] into a layer in place: d rows of weights, and a last row of biases if present.

    The BatchNorm after the layer, if any, takes the bias and becomes neutral otherwise. A layer without bias gets one
    if needed.
    """
    weight = module.weight
    rows = weight[0].numel()
    weight.copy_(solution[:rows].T.reshape(weight.shape))
    bias = solution[rows:].flatten().to(weight) if len(solution) > rows else None
    if norm is not None:
        norm.weight.fill_(1.0)
        norm.bias.copy_(torch.zeros_like(norm.bias) if bias is None else bias)
        norm.running_mean.fill_(0.0)
        norm.running_var.fill_(1.0 - norm.eps)
        bias = None if module.bias is None else weight.new_zeros(len(weight))
    if bias is not None:
        module.register_parameter("bias", nn.Parameter(bias))


def _mean(name: str, states: Sequence[State], shares: Mapping[str, list[float]]) -> Tensor:
    each = shares.get(name.rpartition(".")[0], [1.0] * len(states))
    parts = [(share, state[name]) for share, state in zip(each, states, strict=True) if share and name in state]
    if not parts[0][1].is_floating_point():
        return parts[0][1].clone()
    total = torch.stack([share * part.double() for share, part in parts]).sum(dim=0)
    return (total / sum(share for share, _ in parts)).to(parts[0][1])


def prepared(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> Frame:
    """Return the networks brought to the depth of `networks[depth]`. Raise UserError as `fuse` and `weighted`."""
    weighted(wire(networks[depth], probe[:1]))
    fused = fuse(networks, into=into, depth=depth, probe=probe, settings=FusionSettings(repair=False, refit="none"))
    bodies = tuple(copy.deepcopy(body).eval() for body in fused.balanced)
    wirings = tuple(wire(body, probe[:1]) for body in bodies)
    structure = wirings[depth]
    added = []
    for network, match in zip(networks, fused.alignment, strict=True):
        fewer = len(wire(network, probe[:1]).units) <= len(structure.units)
        lacking = [unit for index, unit in enumerate(structure.units) if fewer and index not in match]
        added.append({name for unit in lacking for name in unit.layers})
    names = {layer.name: None for layer in structure.layers}
    shares = {name: [float(name not in lacks) for lacks in added] for name in names}
    shares = {name: [share / sum(each) for share in each] for name, each in shares.items()}
    plans = tuple({layer.outputs: plan[layer.name] for layer in structure.layers if layer.name in plan}
                  for plan in fused.plans)  # fmt: skip
    return Frame(bodies, wirings, into, depth, probe, plans, shares)


def refuse_unequal_widths(frame: Frame, name: str) -> None:
    """Raise UserError if widths differ between the networks. The message has the method's `name` and a layer."""
    for axis in frame.structure.axes:
        sizes = [wiring.axes[axis.index].size for wiring in frame.wirings]
        if len(set(sizes)) > 1:
            raise UserError(f"{name}: '{axis.slots[0].tensor}' has {sizes} channels in the networks; use equal widths")


def spread(plan: Tensor) -> Tensor:
    """Return a plan [n, m] for weights that read the channels: rows sum to 1, so copies of a channel share its weight."""
    return plan / plan.sum(dim=1, keepdim=True).clamp(min=torch.finfo(plan.dtype).tiny)


def weighted(wiring: Wiring) -> list[Layer]:
    """Return a network's convolutions and linear layers, once each. Raise UserError if any layer is neither, nor a norm."""
    first: dict[str, Layer] = {}
    for layer in wiring.layers:
        if layer.kind not in ("conv", "linear", "norm"):
            raise UserError(
                f"layer '{layer.name}' is {layer.kind}: comparators support plain convolutions and linear layers"
            )
        if layer.kind != "norm":
            first.setdefault(layer.name, layer)
    return list(first.values())


def norms(structure: Wiring, network: nn.Module) -> dict[str, str]:
    """Return, for each convolution and linear layer, the name of the BatchNorm that alone reads it; "" without one.

    Raise UserError if a norm is elsewhere, is not a BatchNorm, or has no scale or running statistics.
    """
    kind = {layer.node: layer for layer in structure.layers}
    readers = {node.name: [user.name for user in node.users] for node in structure.graph.graph.nodes}
    norm_of = {}
    for layer in weighted(structure):
        users = readers[layer.node]
        norm = kind.get(users[0]) if len(users) == 1 else None
        norm_of[layer.name] = norm.name if norm and norm.kind == "norm" else ""
    for name in (layer.name for layer in structure.layers if layer.kind == "norm"):
        module = network.get_submodule(name)
        if name not in norm_of.values() or running(module) is None or module.weight is None:
            raise UserError(f"layer '{name}': this comparator only supports BatchNorm, with a scale and running statistics, "
                            "directly after a convolution or linear layer")  # fmt: skip
    return norm_of


def walk(wiring: Wiring, probe: Tensor) -> Iterator[tuple[fx.Node, dict[fx.Node, Tensor]]]:
    """Run a network node by node, and yield each node with the values of itself and of its inputs.

    Copy the values, because later nodes can work in place. Call it under torch.no_grad, with the network in eval
    mode.
    """
    run = Runner(wiring.graph)
    run.args_iter = iter((probe.clone(),))
    for node in wiring.graph.graph.nodes:
        if node.op != "output":
            run.env[node] = run.run_node(node)
            yield node, run.env
        for old in run.user_to_last_uses.get(node, ()):
            run.env.pop(old, None)


def in_channels(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Map rows [r, n * q], n channels with q entries each, to [r, m * q] by matrix [n, m]; None: unchanged."""
    if matrix is None:
        return rows
    return torch.einsum("rnq,nm->rmq", rows.view(len(rows), len(matrix), -1), matrix.to(rows)).flatten(1)


def products(x: Tensor, y: Tensor) -> Tensor:
    """Return x'y [d, m] in float64 from [r, d] and [r, m], computed in pieces."""
    pieces = zip(x.split(4096), y.split(4096), strict=True)
    return sum((one.double().T @ other.double() for one, other in pieces), torch.zeros((), dtype=torch.float64))


def ridge(gram: Tensor, cross: Tensor, start: Tensor | None = None) -> Tensor:
    """Solve gram [d, d] W = cross [d, m]; return W [d, m]. A ridge of RIDGE x diagonal pulls it to `start` (None: 0)."""
    diagonal = gram.diagonal()
    damped = gram + torch.diag(RIDGE * (diagonal + FLOOR * diagonal.mean().clamp(min=1e-12)))
    rest = cross if start is None else cross - gram @ start
    change = torch.linalg.solve(damped, rest)
    return change if start is None else start + change


def with_ones(rows: Tensor) -> Tensor:
    """Append a column of ones, for the bias."""
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
