"""Fuse networks of equal or different depth and width into one.

`fuse` aligns layers and balances depths (CLA+OT, Alg. 2, steps 1 and 2). By default it then selects channels of all
networks and refits layers on the probe set, without transport plans. FusionSettings(refit="none") and "plans" transport
and average (Alg. 2, step 3), with one plan for each axis, so that residual streams stay whole; where some networks lack a
layer, only the others are averaged. FusionSettings.reference() follows the public code.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.checks import check_places, mixing_weights
from fedloom.fusion.classes import in_classes, united
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.inputs import plain_networks
from fedloom.fusion.results import Fused
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.steps import Fusion

LARGE = "the values of the inputs or networks are too large for their type; scale them, or convert all to float64"


def fuse(
    networks: Sequence[nn.Module],
    *,
    into: int,
    depth: int | None = None,
    probe: Tensor,
    weights: Sequence[float] | None = None,
    classes: Sequence[Sequence[str]] | None = None,
    settings: FusionSettings | None = None,
) -> Fused:
    """Fuse two or more networks into one. CLA+OT, Alg. 2, with selected channels and refitted layers (`settings.refit`).

    The input networks stay unchanged. Refit and repair add biases to layers without norm, and say so in
    `Fused.notes`.

    Args:
        networks: The networks to fuse, each a traceable `nn.Module` that takes `probe`.
        into: The index of the network whose widths the result has.
        depth: The index of the network whose layers the result has; default: `into`. Inside blocks that `into` lacks,
            the widths are those of `depth`.
        probe: Inputs without labels, [k, ...] with k >= 2, of the networks' dtype, range and device; 200 are usual.
            Networks of a run take images in [-1, 1].
        weights: One share for each network, not negative; default: equal.
        classes: One list of output names for each network. The result answers for all of them, those of `into` first
            (`Fused.classes`).
        settings: How to fuse.

    Returns:
        The fused network in `Fused.network`, with the alignment, plans, costs and notes.

    Raises:
        UserError: The networks differ in family, input channels or number of classes, are not finite or traceable, or
            the probe set is not usable. The message says which network and layer.
    """
    if not isinstance(settings, FusionSettings | None):
        raise UserError(f"fuse: settings {settings!r}; use FusionSettings(...)")
    networks, depth = plain_networks(networks), into if depth is None else depth
    check_places(len(networks), into, depth)
    shares = mixing_weights(weights, len(networks))
    names = () if classes is None else united(classes, into)
    with torch.inference_mode(False):
        networks, probe = [_usable(network) for network in networks], probe.clone() if _inference(probe) else probe
        inputs = networks if classes is None else in_classes(networks, classes, names, probe)
        fused = Fusion(inputs, into, depth, probe, settings or FusionSettings()).run(shares)
    for name, tensor in fused.network.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"fuse: '{name}' of the fused network is not finite: {LARGE}")
    return replace(fused, classes=names)


def _inference(probe: object) -> bool:
    return isinstance(probe, Tensor) and probe.is_inference()


def _usable(network: nn.Module) -> nn.Module:
    """Return the network, or a copy if it was made in inference mode, because such tensors have no gradients."""
    state = network.state_dict()
    if not any(tensor.is_inference() for tensor in state.values()):
        return network
    return with_state(network, {name: tensor.clone() for name, tensor in state.items()})
