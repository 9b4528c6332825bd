"""Select channels of several networks: those that best explain the channels of all networks.

For each axis, the channels of all networks are pooled, each weighted by how much the network's answers depend on it.
Channels (or groups that move as a whole) are selected greedily, so that linear regression from them explains the rest
best: column subset selection. Equal channels of several networks count once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.fusion.refit.least_squares import squared

RIDGE = 1e-2  # relative to a selected channel's variance, in the regression of the others on the selected ones
ALIKE = 1e-3  # channels that differ by less, relative to their size, are equal
PRINTS = 8
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Pool:
    """The channels of an axis in all networks, concatenated: N of them.

    Attributes:
        sizes: The number of channels of each network.
        covariance: Of the values that the channels pass on, summed over the points where the axis is read; [N, N],
            float64.
        weighted: The same with each channel weighted by its importance.
        twins: For each channel, the channel that represents it and its equals, [N].
        groups: Channels that are selected or dropped together, int64 [blocks, channels of a block].
    """

    sizes: tuple[int, ...]
    covariance: Tensor
    weighted: Tensor
    twins: Tensor
    groups: Tensor


@dataclass(frozen=True, eq=False)
class Choice:
    """A selection from a pool: m of N channels.

    Attributes:
        sizes: The number of channels of each network.
        chosen: The indices of the selected channels, [m].
        blocks: The indices of their groups.
        keeps: 1 where channel n becomes channel m, [N, m].
        follows: The weights that estimate channel n from the selected ones, [N, m].
    """

    sizes: tuple[int, ...]
    chosen: Tensor
    blocks: Tensor
    keeps: Tensor
    follows: Tensor

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return `keeps` and `follows` for the channels of the network `index`."""
        start = sum(self.sizes[:index])
        rows = slice(start, start + self.sizes[index])
        return self.keeps[rows], self.follows[rows]

    def taken(self) -> list[int]:
        """Return the number of channels selected from each network."""
        return [int(self.rows(index)[0].sum()) for index in range(len(self.sizes))]


def keeping(sizes: Sequence[int], chosen: Tensor | None = None) -> Choice:
    """Return a Choice of the channels `chosen`, by default the first network's. It does not estimate the others."""
    chosen = torch.arange(sizes[0]) if chosen is None else chosen
    keeps = _ones(chosen, sum(sizes))
    return Choice(tuple(sizes), chosen, chosen, keeps, keeps)


def side_by_side(pools: Sequence[Pool]) -> Pool:
    """Concatenate pools with the same groups into one. Each group then has its channels of all pools."""
    starts = [sum(len(pool.twins) for pool in pools[:index]) for index in range(len(pools))]
    groups, twins = ([getattr(pool, name) + start for pool, start in zip(pools, starts, strict=True)]
                     for name in ("groups", "twins"))  # fmt: skip
    covariance = torch.block_diag(*(pool.covariance for pool in pools))
    weighted = torch.block_diag(*(pool.weighted for pool in pools))
    return Pool((), covariance, weighted, torch.cat(twins), torch.cat(groups, dim=1))


def importance(values: Tensor, sensitivity: Tensor) -> Tensor:
    """Return the channels' weights [c] at one node: the root of the mean squared gradient, scaled to total variance 1.

    `values`: [c, n]. `sensitivity`: mean squared gradients, [c].
    """
    spread = values.double().var(dim=1, unbiased=False)
    if not 0.0 < float((spread * sensitivity).sum()) < float("inf"):
        sensitivity = torch.ones_like(spread)  # gradients vanish if the answers are certain
    return (sensitivity / (spread * sensitivity).sum().clamp(min=TINY)).sqrt()


def pooled(points: Iterable[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int], groups: Tensor) -> Pool:
    """Return the Pool of an axis: the channels of all networks.

    `points`: for each point where the axis is read, the values [N, n] after the activation, the importance [N], and
    the values before the activation, which identify channels.
    """
    channels, generator = sum(sizes), torch.Generator().manual_seed(0)
    covariance, weighted = (torch.zeros(channels, channels, dtype=torch.float64) for _ in range(2))
    prints = torch.zeros(channels, PRINTS, dtype=torch.float64)
    for values, weight, before in points:
        prints += before @ torch.randn(values.shape[1], PRINTS, generator=generator, dtype=torch.float64).to(before)
        centred = values - values.mean(dim=1, keepdim=True)
        live = centred.any(dim=1).nonzero()[:, 0]  # a network that lacks the layer has zeros
        part = squared(centred[live]).double() / values.shape[1]
        covariance[live[:, None], live] += part
        weighted[live[:, None], live] += weight[live, None] * part * weight[live]
    return Pool(tuple(sizes), covariance, weighted, _twins(prints, sizes), groups)


def _twins(prints: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the representative of each channel, identified by random sums of its values, [N, PRINTS].

    The k-th of a network's equal channels is represented by the k-th of the first network that has so many.
    """
    apart, size = torch.cdist(prints, prints, compute_mode="donot_use_mm_for_euclid_dist"), prints.norm(dim=1)
    kinds = (apart <= ALIKE * torch.minimum(size[:, None], size) + TINY).int().argmax(dim=1)
    first: dict[tuple[int, int], int] = {}
    twins: list[int] = []
    for own in kinds.split(list(sizes)):
        seen: dict[int, int] = {}
        for kind in own.tolist():
            seen[kind] = seen.get(kind, -1) + 1
            twins.append(first.setdefault((kind, seen[kind]), len(twins)))
    return torch.tensor(twins)


def choose(pool: Pool, blocks: int) -> Choice:
    """Return the best Choice of `blocks` groups. If too few channels differ, add others, the first network's first."""
    return choice_of(pool, best_groups(pool, blocks))


def best_groups(pool: Pool, count: int) -> Tensor:
    """Return the groups that best explain all channels of a pool: indices, int64 [count], in ascending order."""
    relevant = pool.weighted.diagonal()[pool.groups].sum(dim=1) > 0.0
    candidates = (pool.twins[pool.groups] == pool.groups).any(dim=1) & relevant
    few = int(candidates.sum()) <= count  # nothing to select
    order = candidates.nonzero()[:, 0].tolist() if few else _greedy(pool.weighted, pool.groups, candidates, count)
    order += [block for block in range(len(pool.groups)) if block not in order][: count - len(order)]
    return torch.tensor(sorted(order))


def choice_of(pool: Pool, blocks: Tensor) -> Choice:
    """Return the Choice that retains the channels of some groups. Its weights estimate the other channels from them.

    Args:
        pool: The channels of all networks.
        blocks: The indices of the groups.
    """
    chosen = pool.groups[blocks].flatten()
    return Choice(pool.sizes, chosen, blocks, _ones(chosen, len(pool.twins)), _followed(pool.covariance, chosen, pool.twins))


def _greedy(covariance: Tensor, groups: Tensor, candidates: Tensor, count: int) -> list[int]:
    """Return the groups that explain most of the covariance [N, N], each in addition to the groups before it."""
    if groups.shape[1] > 1:
        return _greedy_groups(covariance, groups, candidates, count)
    own = groups[:, 0]
    if not torch.equal(own, torch.arange(len(covariance))):
        covariance = covariance[own][:, own]
    return _greedy_channels(covariance, candidates, count)


def _greedy_channels(covariance: Tensor, candidates: Tensor, count: int) -> list[int]:
    """Select single channels, without forming the residual covariance (Farahat, Ghodsi and Kamel 2011, Alg. 1).

    `lead` are its squared column norms, `rest` its diagonal. The products that only change `lead` are in float32.
    """
    single = covariance.float()
    lead, rest = covariance.square().sum(dim=0), covariance.diagonal().clone()
    floor, free = ALIKE**2 * rest + TINY, candidates.clone()
    taken, chosen = covariance.new_zeros(count, len(covariance)), []
    rounded = torch.zeros_like(single[:count])
    for step in range(count):
        gains = torch.where(free, lead.clamp(min=0.0) / rest.clamp(min=0.0).add(floor), -1.0)
        best = int(gains.argmax())
        chosen.append(best)
        free[best] = False
        before = taken[:step]
        column = covariance[best] - before[:, best] @ before
        column = column / (column[best].clamp(min=0.0) + floor[best]).sqrt()
        rounded[step] = column
        product = single @ rounded[step] - (rounded[:step] @ rounded[step]) @ rounded[:step]
        lead = lead - 2.0 * column * product + column.square() * column.square().sum()
        rest = rest - column.square()
        taken[step] = column
    return chosen


def _greedy_groups(covariance: Tensor, groups: Tensor, candidates: Tensor, count: int) -> list[int]:
    rest, chosen, free = covariance.clone(), [], candidates.clone()
    for _ in range(count):
        gains = torch.stack([(rest[:, block] @ _inverse(rest, block) * rest[:, block]).sum() for block in groups])
        best = int(torch.where(free, gains, -1.0).argmax())
        chosen.append(best)
        free[best] = False
        columns = rest[:, groups[best]]
        rest = rest - columns @ _inverse(rest, groups[best]) @ columns.T
    return chosen


def _inverse(covariance: Tensor, block: Tensor) -> Tensor:
    return torch.linalg.pinv(covariance[block][:, block], hermitian=True, rtol=ALIKE**2)


def _ones(chosen: Tensor, channels: int) -> Tensor:
    keeps = torch.zeros(channels, len(chosen), dtype=torch.float64)
    keeps[chosen, torch.arange(len(chosen))] = 1.0
    return keeps


def _followed(covariance: Tensor, chosen: Tensor, twins: Tensor) -> Tensor:
    """Return [N, m] by ridge regression; a selected channel and its twins follow from that channel alone."""
    own = covariance[chosen][:, chosen].clone()
    own.diagonal().add_(RIDGE * (own.diagonal() + RIDGE * own.diagonal().mean()) + TINY)
    follows = torch.linalg.solve(own, covariance[chosen]).T
    index = torch.full((len(twins),), -1)
    index[twins[chosen].flip(0)] = torch.arange(len(chosen)).flip(0)
    same = index[twins] >= 0
    follows[same] = 0.0
    follows[same, index[twins][same]] = 1.0
    follows[chosen] = torch.eye(len(chosen), dtype=torch.float64)
    return follows
