"""Which channels of several networks a network of fewer keeps: those that explain best what all of them do.

For each axis the channels of all networks are pooled, each weighted by how much the network's answers hang on it. Chosen
greedily, one after the other (a group of channels that moves as a whole at once), are those from which the rest follows best
by linear regression: column subset selection. A channel that several networks have alike counts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-2  # of a kept channel's variance, where the channels that are not kept are regressed on the kept ones
ALIKE = 1e-3  # of their size: channels that differ by no more are the same
PRINTS = 8
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Pool:
    """The channels of an axis in all networks, side by side: N of them.

    `sizes`: how many each network has; `covariance` [N, N] float64 of what they hand on, summed over the places where the
    axis is read; `weighted`: the same with each channel weighted by its importance; `twins` [N]: for each channel the one
    that stands for it and those that are the same; `groups`: the channels that are kept or dropped together, int64
    [blocks, channels of a block].
    """

    sizes: tuple[int, ...]
    covariance: Tensor
    weighted: Tensor
    twins: Tensor
    groups: Tensor


@dataclass(frozen=True, eq=False)
class Choice:
    """What is kept of a pool: m channels of N.

    `sizes`: how many channels each network has; `kept` [m]: their places; `blocks`: those of their groups; `keeps`
    [N, m]: 1 where channel n becomes channel m; `follows` [N, m]: how channel n follows from those that are kept.
    """

    sizes: tuple[int, ...]
    kept: Tensor
    blocks: Tensor
    keeps: Tensor
    follows: Tensor

    def rows(self, place: int) -> tuple[Tensor, Tensor]:
        """`keeps` and `follows` of the channels of the network at a place."""
        start = sum(self.sizes[:place])
        rows = slice(start, start + self.sizes[place])
        return self.keeps[rows], self.follows[rows]

    def taken(self) -> list[int]:
        """How many channels are kept of each network."""
        return [int(self.rows(place)[0].sum()) for place in range(len(self.sizes))]


def keeping(sizes: Sequence[int], kept: Tensor | None = None) -> Choice:
    """The given channels of a pool, by default the first network's, of which nothing else follows."""
    kept = torch.arange(sizes[0]) if kept is None else kept
    keeps = _ones(kept, sum(sizes))
    return Choice(tuple(sizes), kept, kept, keeps, keeps)


def side_by_side(pools: Sequence[Pool]) -> Pool:
    """Pools of the same groups as one: a group has its channels of all of them."""
    starts = [sum(len(pool.twins) for pool in pools[:place]) for place in range(len(pools))]
    groups, twins = ([getattr(pool, name) + start for pool, start in zip(pools, starts, strict=True)]
                     for name in ("groups", "twins"))  # fmt: skip
    covariance = torch.block_diag(*(pool.covariance for pool in pools))
    weighted = torch.block_diag(*(pool.weighted for pool in pools))
    return Pool((), covariance, weighted, torch.cat(twins), torch.cat(groups, dim=1))


def importance(values: Tensor, sensitivity: Tensor) -> Tensor:
    """[c] weights of the channels at one place: root of the mean squared gradient, so that all variances add up to 1.

    values: [c, n]; sensitivity: [c], mean squared gradients there.
    """
    spread = values.double().var(dim=1, unbiased=False)
    if not 0.0 < float((spread * sensitivity).sum()) < float("inf"):
        sensitivity = torch.ones_like(spread)  # answers beyond doubt hang on nothing
    return (sensitivity / (spread * sensitivity).sum().clamp(min=TINY)).sqrt()


def pooled(points: Sequence[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int], groups: Tensor) -> Pool:
    """The pool of an axis. points: for each place where it is read the values [N, n] behind the activation, the importance
    [N], and the values before the activation, by which channels are known."""
    channels, generator = sum(sizes), torch.Generator().manual_seed(0)
    covariance, weighted = (torch.zeros(channels, channels, dtype=torch.float64) for _ in range(2))
    prints = torch.zeros(channels, PRINTS, dtype=torch.float64)
    for values, weight, before in points:
        prints += before.double() @ torch.randn(values.shape[1], PRINTS, generator=generator, dtype=torch.float64)
        centred = values - values.mean(dim=1, keepdim=True)
        part = (centred @ centred.T).double() / values.shape[1]
        covariance += part
        weighted += weight[:, None] * part * weight
    return Pool(tuple(sizes), covariance, weighted, _twins(prints, sizes), groups)


def _twins(prints: Tensor, sizes: Sequence[int]) -> Tensor:
    """Channels are known by random sums of their values, [N, PRINTS]. Of those that are the same, the k-th of each network
    is the k-th of the first network that has so many."""
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
    """Keep so many groups of a pool. With fewer channels that differ, the first network's others are kept as well."""
    return settled(pool, best_groups(pool, blocks))


def best_groups(pool: Pool, count: int) -> Tensor:
    """The places of so many groups of a pool, int64 [count], rising."""
    heeded = pool.weighted.diagonal()[pool.groups].sum(dim=1) > 0.0
    candidates = (pool.twins[pool.groups] == pool.groups).any(dim=1) & heeded
    few = int(candidates.sum()) <= count  # nothing to choose
    order = candidates.nonzero()[:, 0].tolist() if few else _greedy(pool.weighted, pool.groups, candidates, count)
    order += [block for block in range(len(pool.groups)) if block not in order][: count - len(order)]
    return torch.tensor(sorted(order))


def settled(pool: Pool, blocks: Tensor) -> Choice:
    """The choice of these groups of a pool."""
    kept = pool.groups[blocks].flatten()
    return Choice(pool.sizes, kept, blocks, _ones(kept, len(pool.twins)), _followed(pool.covariance, kept, pool.twins))


def _greedy(covariance: Tensor, groups: Tensor, candidates: Tensor, count: int) -> list[int]:
    """Groups that explain most of the covariance [N, N], each beside those before it."""
    if groups.shape[1] > 1:
        return _greedy_groups(covariance, groups, candidates, count)
    own = groups[:, 0]
    return _greedy_channels(covariance[own][:, own], candidates, count)


def _greedy_channels(covariance: Tensor, candidates: Tensor, count: int) -> list[int]:
    """Single channels. What is left of the covariance is never formed (Farahat, Ghodsi and Kamel 2011, Alg. 1): `lead` are
    its squared column norms, `rest` its diagonal."""
    lead, rest = covariance.square().sum(dim=0), covariance.diagonal().clone()
    floor, free = ALIKE**2 * rest + TINY, candidates.clone()
    taken, chosen = covariance.new_zeros(count, len(covariance)), []
    for step in range(count):
        gains = torch.where(free, lead.clamp(min=0.0) / rest.clamp(min=0.0).add(floor), -1.0)
        best = int(gains.argmax())
        chosen.append(best)
        free[best] = False
        before = taken[:step]
        column = covariance[best] - before[:, best] @ before
        column = column / (column[best].clamp(min=0.0) + floor[best]).sqrt()
        told = covariance @ column - (before @ column) @ before
        lead = lead - 2.0 * column * told + column.square() * column.square().sum()
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


def _ones(kept: Tensor, channels: int) -> Tensor:
    keeps = torch.zeros(channels, len(kept), dtype=torch.float64)
    keeps[kept, torch.arange(len(kept))] = 1.0
    return keeps


def _followed(covariance: Tensor, kept: Tensor, twins: Tensor) -> Tensor:
    """[N, m]: by ridge regression; a kept channel and its twins by itself alone."""
    own = covariance[kept][:, kept].clone()
    own.diagonal().add_(RIDGE * (own.diagonal() + RIDGE * own.diagonal().mean()) + TINY)
    follows = torch.linalg.solve(own, covariance[kept]).T
    place = torch.full((len(twins),), -1)
    place[twins[kept].flip(0)] = torch.arange(len(kept)).flip(0)
    same = place[twins] >= 0
    follows[same] = 0.0
    follows[same, place[twins][same]] = 1.0
    follows[kept] = torch.eye(len(kept), dtype=torch.float64)
    return follows
