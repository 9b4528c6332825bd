"""Published ways to merge networks, in the frame of `fuse`: depths balanced as there, then each paper's own rule.

COMPARATORS by name: (networks, into, depth, probe) -> nn.Module, with the arguments of `fuse`. Layers that a network lacks
are the others' alone where weights are averaged. Networks of unequal width are brought to the widths of `into` by the
plans of `fuse`, unless a comparator says otherwise; what one cannot do it refuses with a UserError of one line.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.refit.patches import patches, picked
from fedloom.fusion.state import BATCH_NORM
from fedloom.sims.experiments.comparators.channels import cca_merge, git_rebasin, zipit
from fedloom.sims.experiments.comparators.layers import (
    ROWS,
    in_channels,
    prepared,
    products,
    ridge,
    walk,
    weighted,
    with_ones,
    written,
)
from fedloom.sims.experiments.comparators.sequential import hungarian, kmeans

KEPT = 0.9  # RegMean: of the Gram matrices' off-diagonals


@torch.no_grad()
def regmean(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """RegMean (Jin et al. 2023, Eq. 2) in the aligned basis: W = (sum G_i)^-1 sum G_i W_i, G_i = X_i'X_i of the inputs'
    patches, off-diagonals times 0.9; all other parameters averaged; statistics repaired (REPAIR)."""
    frame = prepared(networks, into, depth, probe)
    moves, share = frame.by_plans(), max(1, ROWS // len(probe))
    result = frame.averaged(moves, frame.shares)
    states = [frame.moved(place, move) for place, move in enumerate(moves)]
    layers = {layer.node: layer for layer in weighted(frame.structure)}
    for steps in zip(*(walk(wiring, probe) for wiring in frame.wirings), strict=True):
        if (layer := layers.get(steps[0][0].name)) is None:
            continue
        grams, cross = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for place, (node, env) in enumerate(steps):
            if part := frame.shares[layer.name][place]:
                module = frame.bodies[place].get_submodule(layer.name)
                x = patches(module, env[node.all_input_nodes[0]], share)[0]
                x = in_channels(x, frame.plans[place].get(layer.inputs))
                gram = products(x, x)
                gram = part * (KEPT * gram + (1.0 - KEPT) * torch.diag(gram.diagonal()))
                grams = grams + gram
                cross = cross + gram @ states[place][f"{layer.name}.weight"].double().flatten(1).T
        weight = result.get_parameter(f"{layer.name}.weight")
        start = weight.double().flatten(1).T
        weight.copy_((start + torch.linalg.lstsq(_solid(grams), cross - grams @ start).solution).T.view_as(weight))
    return frame.repaired(result, moves, frame.shares)


def _solid(gram: Tensor) -> Tensor:
    """Inputs that are never there would make it singular."""
    return gram + 1e-6 * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), dtype=gram.dtype)


@torch.no_grad()
def pleas(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """PLeaS (Nasery et al. 2024, Sec. 3.2), all layers merged: W = argmin ||(sum Z_i P_i) W - sum Z'_i P'_i||^2, layer by
    layer on the parents' own activations Z (patches) and outputs Z', P the plans; then BatchNorm statistics measured again.

    The paper descends from the averaged weights; this is the closed form, drawn a little towards them.
    """
    frame = prepared(networks, into, depth, probe)
    share, result = max(1, ROWS // len(probe)), frame.averaged(frame.by_plans(), frame.shares)
    layers = {layer.node: layer for layer in weighted(frame.structure)}
    for steps in zip(*(walk(wiring, probe) for wiring in frame.wirings), strict=True):
        if (layer := layers.get(steps[0][0].name)) is None:
            continue
        given, wanted = [], []
        for place, (node, env) in enumerate(steps):
            module = frame.bodies[place].get_submodule(layer.name)
            x = patches(module, env[node.all_input_nodes[0]], share)[0]
            given.append(in_channels(x, frame.plans[place].get(layer.inputs)))
            y = in_channels(picked(env[node], share), frame.plans[place].get(layer.outputs))
            wanted.append(frame.shares[layer.name][place] * y)
        there = [x for x in given if x.any()]  # inside of a block that a network lacks it has nothing
        module = result.get_submodule(layer.name)
        x, start = torch.stack(there).mean(dim=0), module.get_parameter("weight").double().flatten(1).T
        if isinstance(module.bias, Tensor):
            x, start = with_ones(x), torch.cat([start, module.bias.double()[None]])
        written(module, None, ridge(products(x, x), products(x, torch.stack(wanted).sum(dim=0)), start))
    if any(isinstance(module, BATCH_NORM) for module in result.modules()):
        recompute_statistics(result, [probe])
    return result


COMPARATORS: dict[str, Callable[[Sequence[nn.Module], int, int, Tensor], nn.Module]] = {
    "Git Re-Basin": git_rebasin,
    "RegMean, aligned": regmean,
    "PLeaS": pleas,
    "HF-linear": hungarian,
    "KF-linear": kmeans,
    "ZipIt": zipit,
    "CCA Merge": cca_merge,
}
