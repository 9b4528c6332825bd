"""Retrofitting (Model Fusion via Retrofitting, arXiv 2507.00037v2): train the fused network level by level."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedloom.fusion.distillation import distillation_loss
from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.probe import Runner
from fedloom.fusion.refit.patches import picked
from fedloom.sims.experiments.comparators.layers import ROWS, Frame, norms, prepared, walk
from fedloom.sims.experiments.comparators.sequential import clusters

STEPS, BATCH, RATE = 200, 64, 1e-3  # Adam, at each level
TEMPERATURE = 2.0  # of the last level's distillation

Values = Mapping[str, Tensor]  # by node: the outputs [k, channels, ...] of a level


@dataclass(frozen=True)
class Level:
    """A hidden layer with its norm, a residual block, or the last layers.

    Attributes:
        end: The node whose output is the level's.
        axis: The axis of its channels.
        layers: The names of the layers to train.
    """

    end: str
    axis: int
    layers: tuple[str, ...]


def retrofit(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by Retrofitting: weighted k-means over the neurons of all networks, started at those of `into`.

    A neuron's importance is the mean of |output x gradient|, with the gradient of the log-probability of the network's
    own answer. Level by level, Adam trains the weights of `into` on the fused network's own inputs: the error at each
    group's weighted mean counts by the group's importance. The last level imitates the mean answer. Groups are formed
    once for each axis, because skip connections fix the order of channels. Works for any widths.
    """
    frame = prepared(networks, into, depth, probe)
    levels = _levels(frame.structure, norms(frame.structure, frame.bodies[into]))
    seen = [_observed(body, wiring, levels, probe) for body, wiring in zip(frame.bodies, frame.wirings, strict=True)]
    result = copy.deepcopy(frame.bodies[into])
    needed = [weight.requires_grad for weight in result.parameters()]
    graph = wire(result, probe[:1]).graph
    run, nodes = Runner(graph), [node for node in graph.graph.nodes if node.op != "output"]
    run.env = {nodes.pop(0): probe}
    generator, groups = torch.Generator().manual_seed(0), dict[int, list[Tensor]]()
    for number, level in enumerate(levels):
        count = 1 + next(k for k, node in enumerate(nodes) if node.name == level.end)
        part, nodes = nodes[:count], nodes[count:]
        if number == len(levels) - 1:
            target, weights = torch.stack([values[level.end] for values, _ in seen]).mean(dim=0), None
        else:
            target, weights = _targets(frame, level, seen, groups)
        _train(run, part, [*_weights(result, level)], target, weights, generator)
    for weight, was in zip(result.parameters(), needed, strict=True):
        weight.requires_grad_(was)
    return result


def _levels(structure: Wiring, behind: Mapping[str, str]) -> list[Level]:
    """Return the levels in the order of execution. `behind`: the norm of each layer, or ""."""
    nodes = {layer.name: layer.node for layer in structure.layers}
    levels = []
    for unit in structure.units:
        end = unit.sum or nodes[behind[unit.layers[0]] or unit.layers[0]]
        levels.append(Level(end, unit.axis, unit.layers))
    known = {name for level in levels for name in level.layers}
    last = [node.name for node in structure.graph.graph.nodes if node.op != "output"][-1]
    rest = [layer for layer in structure.layers if layer.name not in known]
    return [*levels, Level(last, rest[-1].outputs, tuple(dict.fromkeys(layer.name for layer in rest)))]


def _observed(body: nn.Module, wiring: Wiring, levels: Sequence[Level], probe: Tensor) -> tuple[Values, Values]:
    """Return the outputs [k, channels, ...] of each level, and the importance [channels] of its neurons."""
    wanted, held = {level.end for level in levels}, dict[str, Tensor]()
    with torch.enable_grad():
        for node, env in walk(wiring, probe.clone().requires_grad_()):
            if node.name in wanted:
                held[node.name] = env[node].clone()  # a later layer may work in place
                held[node.name].retain_grad()
                env[node] = held[node.name] * 1.0
        answers = held[levels[-1].end].log_softmax(dim=1)
        answers.max(dim=1).values.sum().backward()
    body.zero_grad(set_to_none=True)
    importance = {}
    for name, value in held.items():
        assert value.grad is not None
        share = (value.detach() * value.grad).abs().transpose(0, 1).flatten(1).mean(dim=1)
        importance[name] = share / share.mean().clamp(min=1e-12)
    return {name: value.detach() for name, value in held.items()}, importance


def _targets(
    frame: Frame, level: Level, seen: Sequence[tuple[Values, Values]], groups: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the outputs [k, m, ...] that a level learns, and the importance [m] of each channel, of mean 1."""
    order = sorted(range(len(seen)), key=lambda index: index != frame.into)
    if level.axis not in groups:
        share = max(1, ROWS // len(frame.probe))
        outputs = [picked(seen[index][0][level.end], share) for index in order]
        found = clusters(outputs, [seen[index][1][level.end] for index in order])
        groups[level.axis] = [found[order.index(index)] for index in range(len(seen))]
    pairs = list(zip(seen, groups[level.axis], strict=True))
    target = sum(torch.einsum("kn...,nm->km...", values[level.end], matrix) for (values, _), matrix in pairs)
    weights = sum(importance[level.end] @ (matrix > 0).to(matrix) for (_, importance), matrix in pairs)
    assert isinstance(target, Tensor) and isinstance(weights, Tensor)
    return target, weights / weights.mean()


def _weights(network: nn.Module, level: Level) -> Sequence[nn.Parameter]:
    return [weight for name in level.layers for weight in network.get_submodule(name).parameters(recurse=False)]


def _train(
    run: Runner, part: Sequence[fx.Node], moving: Sequence[nn.Parameter], target: Tensor, weights: Tensor | None,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Train the nodes of a level in place, then replace `run.env`, the level's inputs, by its outputs.

    `weights`: of the channels' squared errors; None for the last level, whose target are logits.
    """
    inputs = dict(run.env)
    for weight in moving:
        weight.requires_grad_(True)
    optimiser = torch.optim.Adam(moving, RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    with torch.enable_grad():
        for _ in range(STEPS):
            drawn = torch.randperm(len(target), generator=generator)[:BATCH]
            loss = _loss(_outputs(run, part, {node: value[drawn] for node, value in inputs.items()}), target[drawn], weights)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    for weight in moving:
        weight.requires_grad_(False)
    with torch.no_grad():
        made = _outputs(run, part, {node: value.clone() for node, value in inputs.items()})
    run.env = {part[-1]: made}


def _outputs(run: Runner, part: Sequence[fx.Node], values: dict[fx.Node, Tensor]) -> Tensor:
    run.env = dict(values)
    for node in part:
        run.env[node] = run.run_node(node)
    return run.env[part[-1]]


def _loss(outputs: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return distillation_loss(outputs, target, TEMPERATURE)
    errors = F.mse_loss(outputs, target, reduction="none").transpose(0, 1).flatten(1).mean(dim=1)
    return (weights * errors).mean()
