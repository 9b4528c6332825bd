"""Repair the statistics of a fused network (REPAIR, Jordan et al. 2023): fused channels vary less than their parents'.

BatchNorms get the parents' own running statistics, corrected by how the fused network differs from the parents on one
probe set. Without BatchNorm, every channel of every layer is rescaled, so that its mean and standard deviation on the
probe set are the parents' mixture; the change is folded into weight and bias. Values within rounding of their target
stay unchanged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.probe import Moments, Runner, moments_of
from fedloom.fusion.state import BATCH_NORM

Statistics = tuple[Tensor, Tensor]  # mean and standard deviation of each channel, float64
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # types whose weight scales the outputs; standardised ones do not
SMALLEST = 1e-5  # smaller standard deviations stay unchanged, so that a constant channel stays constant
ROUNDING = 1e-4  # standard deviations by which equal statistics differ because of float32


@dataclass(frozen=True, eq=False)
class Target:
    """The statistics that a fused network's layers should have, by name: the parents' mixture.

    `seen`: statistics on the probe set; for a BatchNorm, those of its inputs. `own`: BatchNorms' running statistics.
    """

    seen: Mapping[str, Statistics]
    own: Mapping[str, Statistics] = field(default_factory=dict)


def recompute_statistics(network: nn.Module, batches: Sequence[Tensor]) -> None:
    """Replace all BatchNorm running statistics by their mean over batches [k, ...]. Nothing else changes."""
    norms = [module for module in network.modules() if isinstance(module, BATCH_NORM)]
    momenta = [(norm, norm.momentum) for norm in norms]
    with torch.no_grad(), evaluating(network):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain average over batches
            norm.training = True
        try:
            for batch in batches:
                network(batch)
        finally:
            for norm, momentum in momenta:
                norm.momentum = momentum


def repair(network: nn.Module, target: Target, probe: Tensor) -> tuple[str, ...]:
    """Repair a fused network's statistics in place: BatchNorms by `reset`, or else each layer by `rescale`.

    With the target's own samples as `probe` [k, ...], a network that needs no repair stays unchanged.

    Returns:
        The names of layers that got a bias.
    """
    if target.own:
        reset(network, probe, target)
        return ()
    return rescale(network, probe, target.seen) if target.seen else ()


def watched(wiring: Wiring) -> dict[str, str]:
    """Return the nodes whose moments repair needs, by layer: inputs of BatchNorms, or without norms the outputs of layers.

    Excludes the output layer, and layers whose weights do not scale their outputs.
    """
    norms = [layer for layer in wiring.layers if layer.kind == "norm"]
    if norms:
        nodes = {node.name: node for node in wiring.graph.graph.nodes}
        first = first_calls(wiring, [layer.name for layer in norms if running(wiring.graph.get_submodule(layer.name))])
        return {name: nodes[node].all_input_nodes[0].name for name, node in first.items()}
    layers = [layer for layer in wiring.layers if layer.node in wiring.node_axes]
    hidden = [layer.name for layer in layers if not wiring.axes[layer.outputs].fixed]
    return first_calls(wiring, [name for name in hidden if type(wiring.graph.get_submodule(name)) in PLAIN])


def running(norm: nn.Module) -> Statistics | None:
    """Return a BatchNorm's running mean and standard deviation [channels], float64; None for other modules."""
    if not isinstance(norm, BATCH_NORM) or norm.running_mean is None or norm.running_var is None:
        return None
    return norm.running_mean.double(), norm.running_var.double().sqrt()


def in_basis(statistics: Mapping[str, Statistics], outgoing: Mapping[str, Tensor]) -> dict[str, Statistics]:
    """Return layers' statistics after their outputs move by `outgoing`: a new channel's are means over its old channels."""
    moved = {}
    for name, (mean, std) in statistics.items():
        matrix = outgoing[name].to(mean) if name in outgoing else None
        moved[name] = (mean, std) if matrix is None else (mean @ matrix, std @ matrix)
    return moved


def reset(network: nn.Module, probe: Tensor, target: Target) -> None:
    """Set the running statistics of BatchNorms to `target.own`, corrected by how their inputs differ from `target.seen`.

    Works in place and in one pass: each norm sees the outputs of corrected ones. Channels that are constant, here or
    in the parents, stay unchanged.
    """
    with torch.no_grad(), evaluating(network):
        _Resetter(wire(network, probe[:1]), target).run(probe.clone())


def rescale(network: nn.Module, probe: Tensor, target: Mapping[str, Statistics]) -> tuple[str, ...]:
    """Give the named convolution and linear layers the channel means and standard deviations [channels] of `target`.

    Works in place and in one pass: each layer sees the outputs of corrected ones. Constant channels get the mean
    only. If any layer changes, all named layers without bias get one.

    Returns:
        The names of layers that got a bias.
    """
    wiring = wire(network, probe[:1])
    fixed = _Rescaler(wiring, {node: name for name, node in first_calls(wiring, target).items()}, target)
    with torch.no_grad(), evaluating(network):
        fixed.run(probe.clone())
    if not fixed.needed:
        return ()
    modules = {name: network.get_submodule(name) for name in fixed.changes}
    without = tuple(name for name, module in modules.items() if module.bias is None)
    for name, (scale, shift) in fixed.changes.items():
        _fold(modules[name], scale, shift)
    return without


def mixture(parents: Sequence[Mapping[str, Statistics]], shares: Mapping[str, Sequence[float]]) -> dict[str, Statistics]:
    """Return each layer's target statistics: weighted means over the parents that have it (`shares` by its name)."""
    means = {}
    for name in {name: None for parent in parents for name in parent}:
        pairs = [(share, parent[name]) for parent, share in zip(parents, shares[name], strict=True) if name in parent]
        total = sum(share for share, _ in pairs)
        if total > 0.0:
            mean, std = (sum(share * part[k] for share, part in pairs) / total for k in (0, 1))
            means[name] = torch.as_tensor(mean), torch.as_tensor(std)
    return means


def first_calls(wiring: Wiring, names: Collection[str]) -> dict[str, str]:
    """Return {layer name: node of its first call} for the named layers."""
    first: dict[str, str] = {}
    for layer in wiring.layers:
        first.setdefault(layer.name, layer.node)
    return {name: node for name, node in first.items() if name in names}


class _Resetter(Runner):
    """Resets every BatchNorm at its first call, before it is applied."""

    def __init__(self, wiring: Wiring, target: Target) -> None:
        super().__init__(wiring.graph)
        self.target, self.waiting = target, set(target.own)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self.waiting:
            self.waiting.remove(target)
            self._reset(target, moments_of(args[0]))
        return super().call_module(target, args, kwargs)

    def _reset(self, name: str, now: Moments) -> None:
        (mean, std), (own_mean, own_std) = self.target.seen[name], self.target.own[name]
        scale = now.std / std.clamp(min=SMALLEST)
        new = {"running_mean": now.mean + scale * (own_mean - mean), "running_var": (scale * own_std).square()}
        unchanged = near(now, (mean, std)) | (std <= SMALLEST) | (now.std <= SMALLEST)
        for buffer, values in new.items():
            old = self.submodules[name].get_buffer(buffer)
            old.copy_(torch.where(unchanged, old, values.to(old)))


class _Rescaler(Runner):
    def __init__(self, wiring: Wiring, nodes: Mapping[str, str], target: Mapping[str, Statistics]) -> None:
        super().__init__(wiring.graph)
        self.nodes, self.target = nodes, target
        self.changes: dict[str, tuple[Tensor, Tensor]] = {}
        self.needed = False

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name not in self.nodes:
            return value
        name, now = self.nodes[n.name], moments_of(value)
        mean, std = self.target[name]
        if near(now, (mean, std)).all():
            self.changes[name] = torch.ones_like(std), torch.zeros_like(mean)
            return value
        self.needed = True
        scale = torch.where(now.std > SMALLEST, std / now.std.clamp(min=SMALLEST), torch.ones_like(std))
        shift = mean - scale * now.mean
        self.changes[name] = scale, shift
        shape = (1, -1, *[1] * (value.ndim - 2))
        return value.mul_(scale.to(value).view(shape)).add_(shift.to(value).view(shape))


def near(now: Moments, wanted: Statistics) -> Tensor:
    """Return, for each channel, whether its moments equal the wanted statistics up to rounding."""
    mean, std = wanted
    bound = ROUNDING * std + SMALLEST * ROUNDING
    return ((now.mean - mean).abs() <= bound) & ((now.std - std).abs() <= bound)


def _fold(module: nn.Module, scale: Tensor, shift: Tensor) -> None:
    weight = module.get_parameter("weight")
    with torch.no_grad():
        old = module.bias.detach() if isinstance(module.bias, Tensor) else weight.new_zeros(len(weight))
        weight.mul_(scale.to(weight).view(-1, *[1] * (weight.ndim - 1)))
        module.register_parameter("bias", nn.Parameter(old * scale.to(weight) + shift.to(weight)))
