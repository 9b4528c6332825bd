"""Statistics of a fused network set right (REPAIR, Jordan et al. 2023): fused channels vary less than their parents' did.

With BatchNorm its running statistics are measured again. Without, every channel of every layer is rescaled so that its mean
and standard deviation over the probe set are the parents' mixture; the change is folded into weight and bias.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fusion.probe import Moments, moments_of, observe
from fusion.tracing import evaluating
from fusion.wiring import Wiring, wire

Statistics = tuple[Tensor, Tensor]  # mean and standard deviation of each channel, float64
BATCH_NORM = nn.modules.batchnorm._BatchNorm
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # weights that scale the outputs; standardised ones do not
SMALLEST = 1e-5  # standard deviations below this are left as they are: a channel that is constant stays so


def recompute_statistics(network: nn.Module, batches: Sequence[Tensor]) -> None:
    """Measure all BatchNorm running statistics again on batches [k, ...], each of the same weight; nothing else changes."""
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


def repair(network: nn.Module, target: Mapping[str, Statistics], probe: Tensor) -> tuple[str, ...]:
    """Set a fused network's statistics right, in place: BatchNorm's where it has one, else each layer's (rescale).

    `target`: what the layers should have, by name (mixture). probe: [k, ...]; the same samples as the
    target's keep a network as it is that needs no repair. Returns the names of the layers that got a bias.
    """
    if any(isinstance(module, BATCH_NORM) for module in network.modules()):
        recompute_statistics(network, [probe])
        return ()
    return rescale(network, probe, target) if target else ()


def scalable(wiring: Wiring) -> list[str]:
    """The layers that `rescale` can set right: of a network without norms (these measure their own), not the output's."""
    if any(layer.kind == "norm" for layer in wiring.layers):
        return []
    layers = {layer.name: layer for layer in wiring.layers if not wiring.axes[layer.outputs].fixed}
    return [name for name in layers if type(wiring.graph.get_submodule(name)) in PLAIN]


def layer_moments(network: nn.Module, layers: Sequence[str], probe: Tensor) -> dict[str, Moments]:
    """Moments of the named layers' outputs over the probe set, by name; those of several sites add up."""
    wiring = wire(network, probe[:1])
    nodes = first_calls(wiring, layers)
    seen = observe(wiring, probe, moments=set(nodes.values()))
    return {name: seen.moments[node] for name, node in nodes.items()}


def in_basis(moments: Mapping[str, Moments], outgoing: Mapping[str, Tensor]) -> dict[str, Statistics]:
    """Mean and standard deviation [channels] of layers after a move: of a channel that several go into, their means."""
    found = {}
    for name, own in moments.items():
        matrix = outgoing[name].to(own.mean) if name in outgoing else None
        found[name] = (own.mean, own.std) if matrix is None else (own.mean @ matrix, own.std @ matrix)
    return found


def rescale(network: nn.Module, probe: Tensor, target: Mapping[str, Statistics]) -> tuple[str, ...]:
    """Give the named convolution and linear layers the channel means and standard deviations [channels] of `target`.

    In place and in one pass: each layer sees the inputs that the corrected layers before it give. Channels that are
    constant get the mean only. Layers without bias get one; their names are returned.
    """
    wiring = wire(network, probe[:1])
    fixed = _Rescaler(wiring, {node: name for name, node in first_calls(wiring, target).items()}, target)
    with torch.no_grad(), evaluating(network):
        fixed.run(probe.clone())
    modules = {name: network.get_submodule(name) for name in fixed.changes}
    without = tuple(name for name, module in modules.items() if module.bias is None)
    for name, (scale, shift) in fixed.changes.items():
        _fold(modules[name], scale, shift)
    return without


def mixture(parents: Sequence[Mapping[str, Statistics]], shares: Mapping[str, Sequence[float]]) -> dict[str, Statistics]:
    """What the layers should have: the weighted means of those parents that have the layer (`shares` by its name)."""
    found = {}
    for name in {name: None for parent in parents for name in parent}:
        pairs = [(share, parent[name]) for parent, share in zip(parents, shares[name], strict=True) if name in parent]
        total = sum(share for share, _ in pairs)
        if total > 0.0:
            mean, std = (sum(share * part[k] for share, part in pairs) / total for k in (0, 1))
            found[name] = torch.as_tensor(mean), torch.as_tensor(std)
    return found


def first_calls(wiring: Wiring, names: Collection[str]) -> dict[str, str]:
    """The node of each named layer's first call."""
    first: dict[str, str] = {}
    for layer in wiring.layers:
        first.setdefault(layer.name, layer.node)
    return {name: node for name, node in first.items() if name in names}


class _Rescaler(fx.Interpreter):
    def __init__(self, wiring: Wiring, nodes: Mapping[str, str], target: Mapping[str, Statistics]) -> None:
        super().__init__(wiring.graph)
        self.nodes, self.target = nodes, target
        self.changes: dict[str, tuple[Tensor, Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name not in self.nodes:
            return value
        name, now = self.nodes[n.name], moments_of(value)
        mean, std = self.target[name]
        scale = torch.where(now.std > SMALLEST, std / now.std.clamp(min=SMALLEST), torch.ones_like(std))
        shift = mean - scale * now.mean
        self.changes[name] = scale, shift
        shape = (1, -1, *[1] * (value.ndim - 2))
        return value * scale.to(value).view(shape) + shift.to(value).view(shape)


def _fold(module: nn.Module, scale: Tensor, shift: Tensor) -> None:
    weight = module.get_parameter("weight")
    with torch.no_grad():
        old = module.bias.detach() if isinstance(module.bias, Tensor) else weight.new_zeros(len(weight))
        weight.mul_(scale.to(weight).view(-1, *[1] * (weight.ndim - 1)))
        module.register_parameter("bias", nn.Parameter(old * scale.to(weight) + shift.to(weight)))
