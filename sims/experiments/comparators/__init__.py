"""Published ways to merge networks: depths are balanced as in `fuse`, then the paper's own rule follows.

COMPARATORS by name: (networks, into, depth, probe) -> nn.Module, with the arguments of `fuse`. Where a network lacks
a layer, only the others are averaged. Networks of unequal width get the widths of `into` by the plans of `fuse`,
unless a comparator says otherwise. A comparator raises a UserError of one line for what it cannot do.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.refit.patches import patches, picked
from fedloom.fusion.state import BATCH_NORM
from fedloom.sims.experiments.comparators.channels import cca_merge, git_rebasin, zipit
from fedloom.sims.experiments.comparators.depths import identity_expansion, segments
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
from fedloom.sims.experiments.comparators.retrofitting import retrofit
from fedloom.sims.experiments.comparators.sequential import hungarian, kmeans

KEPT = 0.9  # RegMean: factor of the Gram matrices' off-diagonals


@torch.no_grad()
def regmean(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge networks by RegMean (Jin et al. 2023, Eq. 2): W = (sum G_i)^-1 sum G_i W_i.

    G_i = X_i'X_i is the Gram matrix of the layer's inputs (patches) in network i, with off-diagonals times 0.9. Other
    parameters are averaged. Then BatchNorm's statistics are repaired (REPAIR).

    Args:
        networks: The networks to merge.
        into: The index of the network to whose channels the others are aligned.
        depth: The index of the network that sets the layers.
        probe: Images [n, c, h, w].

    Returns:
        The merged network.
    """
    frame = prepared(networks, into, depth, probe)
    moves, share = frame.by_plans(), max(1, ROWS // len(probe))
    result = frame.averaged(moves, frame.shares)
    states = [frame.moved(index, move) for index, move in enumerate(moves)]
    layers = {layer.node: layer for layer in weighted(frame.structure)}
    for steps in zip(*(walk(wiring, probe) for wiring in frame.wirings), strict=True):
        if (layer := layers.get(steps[0][0].name)) is None:
            continue
        grams, cross = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for index, (node, env) in enumerate(steps):
            if part := frame.shares[layer.name][index]:
                module = frame.bodies[index].get_submodule(layer.name)
                x = patches(module, env[node.all_input_nodes[0]], share)[0]
                x = in_channels(x, frame.plans[index].get(layer.inputs))
                gram = products(x, x)
                gram = part * (KEPT * gram + (1.0 - KEPT) * torch.diag(gram.diagonal()))
                grams = grams + gram
                cross = cross + gram @ states[index][f"{layer.name}.weight"].double().flatten(1).T
        weight = result.get_parameter(f"{layer.name}.weight")
        start = weight.double().flatten(1).T
        weight.copy_((start + torch.linalg.lstsq(_solid(grams), cross - grams @ start).solution).T.view_as(weight))
    return frame.repaired(result, moves, frame.shares)


def _solid(gram: Tensor) -> Tensor:
    """Return the Gram with a small ridge, because inputs that are always 0 would make it singular."""
    return gram + 1e-6 * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), dtype=gram.dtype)


@torch.no_grad()
def pleas(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by PLeaS (Nasery et al. 2024, Sec. 3.2), all layers: W = argmin ||(sum Z_i P_i) W - sum Z'_i P'_i||^2.

    Layer by layer, Z are the parents' own activations (patches), Z' their outputs, P the plans. Then BatchNorm
    statistics are measured again. The paper uses gradient descent from the averaged weights; this is the closed form,
    with a small ridge toward them.
    """
    frame = prepared(networks, into, depth, probe)
    share, result = max(1, ROWS // len(probe)), frame.averaged(frame.by_plans(), frame.shares)
    layers = {layer.node: layer for layer in weighted(frame.structure)}
    for steps in zip(*(walk(wiring, probe) for wiring in frame.wirings), strict=True):
        if (layer := layers.get(steps[0][0].name)) is None:
            continue
        inputs, wanted = [], []
        for index, (node, env) in enumerate(steps):
            module = frame.bodies[index].get_submodule(layer.name)
            x = patches(module, env[node.all_input_nodes[0]], share)[0]
            inputs.append(in_channels(x, frame.plans[index].get(layer.inputs)))
            y = in_channels(picked(env[node], share), frame.plans[index].get(layer.outputs))
            wanted.append(frame.shares[layer.name][index] * y)
        present = [x for x in inputs if x.any()]  # inside a block that a network lacks, its input is empty
        module = result.get_submodule(layer.name)
        x, start = torch.stack(present).mean(dim=0), module.get_parameter("weight").double().flatten(1).T
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
    "Identity expansion": identity_expansion,
    "Segments, zipped": segments,
    "Retrofitting": retrofit,
}
