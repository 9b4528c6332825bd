"""Statistics of a fused network set right (REPAIR, Jordan et al. 2023): fused channels vary less than their parents' did.

With BatchNorm its running statistics are measured again. Without, every channel of every layer is rescaled so that its mean
and standard deviation over the probe set are the parents' mixture; the change is folded into weight and bias.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fusion.probe import BATCH, Moments, evaluating, moments_of, observe
from fusion.wiring import Wiring, wire

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # weights that scale the outputs; standardised ones do not
SMALLEST = 1e-5  # standard deviations below this are left as they are: a channel that is constant stays so


def recompute_statistics(network: nn.Module, batches: Sequence[Tensor]) -> None:
    """Measure all BatchNorm running statistics again on batches [k, ...], each of the same weight; nothing else changes."""
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    flags = [(module, module.training) for module in network.modules()]
    momenta = [(norm, norm.momentum) for norm in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over batches
        norm.train()
    try:
        with torch.no_grad():
            for batch in batches:
                network(batch)
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum
        for module, flag in flags:
            module.training = flag


def repair(
    network: nn.Module, parents: Sequence[nn.Module], shares: Mapping[str, Sequence[float]], probe: Tensor
) -> tuple[str, ...]:
    """Set a fused network's statistics right, in place: BatchNorm's where it has one, else each layer's (rescale).

    `parents` are of the same structure and in the same basis, `shares` their weights in each layer, by its name; probe
    [k, ...]. Returns the names of the layers that got a bias.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()):
        recompute_statistics(network, probe.tensor_split(-(-len(probe) // BATCH)))
        return ()
    wiring = wire(network, probe[:1])
    if any(layer.kind == "norm" for layer in wiring.layers):  # GroupNorm and LayerNorm measure their own
        return ()
    layers = [layer.name for layer in wiring.layers if not wiring.axes[layer.outputs].fixed]
    plain = [name for name in layers if type(network.get_submodule(name)) in PLAIN]
    target = mixture([layer_moments(parent, plain, probe) for parent in parents], shares)
    return rescale(network, probe, target)


def layer_moments(network: nn.Module, layers: Sequence[str], probe: Tensor) -> dict[str, Moments]:
    """Moments of the named layers' outputs over the probe set, by name; those of several sites add up."""
    wiring = wire(network, probe[:1])
    nodes = _nodes(wiring, layers)
    seen = observe(wiring, probe, moments=nodes)
    return {nodes[node]: moments for node, moments in seen.moments.items()}


def rescale(network: nn.Module, probe: Tensor, target: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[str, ...]:
    """Give the named convolution and linear layers the channel means and standard deviations [channels] of `target`.

    In place and in one pass: each layer sees the inputs that the corrected layers before it give. Channels that are
    constant get the mean only. Layers without bias get one; their names are returned.
    """
    wiring = wire(network, probe[:1])
    fixed = _Rescaler(wiring, _nodes(wiring, target), target)
    with torch.no_grad(), evaluating(network):
        fixed.run(probe.clone())
    modules = {name: network.get_submodule(name) for name in fixed.changes}
    without = tuple(name for name, module in modules.items() if module.bias is None)
    for name, (scale, shift) in fixed.changes.items():
        _fold(modules[name], scale, shift)
    return without


def mixture(
    parents: Sequence[Mapping[str, Moments]], shares: Mapping[str, Sequence[float]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and standard deviation [channels] that the layers should have: the weighted means of the parents'."""
    found = {}
    for name in parents[0]:
        pairs = list(zip([parent[name] for parent in parents], shares[name], strict=True))
        means = torch.stack([share * moments.mean for moments, share in pairs]).sum(dim=0)
        found[name] = means, torch.stack([share * moments.std for moments, share in pairs]).sum(dim=0)
    return found


def _nodes(wiring: Wiring, names: Collection[str]) -> dict[str, str]:
    """The names of layers by the node of their first call."""
    first: dict[str, str] = {}
    for layer in wiring.layers:
        first.setdefault(layer.name, layer.node)
    return {node: name for name, node in first.items() if name in names}


class _Rescaler(fx.Interpreter):
    def __init__(self, wiring: Wiring, nodes: Mapping[str, str], target: Mapping[str, tuple[Tensor, Tensor]]) -> None:
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
        old = module.bias.detach() if isinstance(module.bias, Tensor) else torch.zeros_like(weight[:, 0].flatten(1)[:, 0])
        weight.mul_(scale.to(weight).view(-1, *[1] * (weight.ndim - 1)))
        module.register_parameter("bias", nn.Parameter(old * scale.to(weight) + shift.to(weight)))
