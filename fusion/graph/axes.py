"""Derive axes from atoms (fusion.graph.labels): which channels can be swapped, and in which groups they move."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.fusion.graph.labels import Atoms, Membership, scrambled

ROUNDS = 4  # of passing colours between groups and members


@dataclass(frozen=True, eq=False)
class Drawn:
    """An axis by its atoms, before it becomes a `channels.Axis`.

    `channels`: the channels' first atoms, [size]. `members`: indices of their groups in the axis `parent`, [size].
    """

    channels: np.ndarray
    fixed: bool
    parent: int | None
    members: np.ndarray | None


class Channels:
    """All channels of a network after a Walk. Channels that are used in the same way (one colour) form an axis."""

    def __init__(self, atoms: Atoms, wanted: np.ndarray) -> None:
        """Resolve groups and build axes. `wanted`: atoms on tensors of the state."""
        self.atoms = atoms
        self.parent = self._resolved()
        self.roots = atoms.find(torch.arange(len(atoms.root))).numpy()
        self.colours = self._spread(self._colours())
        self.axes = self._drawn(np.unique(self.roots[wanted]))
        self.axis_of = np.full(len(self.roots), -1)  # by channel
        self.place_in = np.full(len(self.roots), -1)
        for index, axis in enumerate(self.axes):
            self.axis_of[axis.channels] = index
            self.place_in[axis.channels] = np.arange(len(axis.channels))

    @cached_property
    def entry_colours(self) -> np.ndarray:
        """A colour for each atom: different for a channel's entries, equal for corresponding entries of other channels."""
        return self.atoms.refined()

    def split(self, entries: Tensor) -> dict[int, Tensor]:
        """Return by axis where a row of labels has its channels: int64 [size, r], the positions of each one's r entries."""
        labels = entries.numpy()
        places = np.flatnonzero(labels >= 0)
        labels = labels[places]
        roots = self.roots[labels]
        axes, order = self.axis_of[roots], self.atoms.place[labels]
        by_axis = {}
        for axis in dict.fromkeys(axes.tolist()):
            if axis < 0:
                continue
            own = axes == axis
            counts = np.bincount(self.place_in[roots[own]])
            size = len(self.axes[axis].channels)
            if len(counts) == size and (counts == counts[0]).all():
                tiebreak = self.entry_colours[labels[own]] if counts[0] > 1 else order[own]
                sort = np.lexsort((places[own], tiebreak, order[own], self.place_in[roots[own]]))
                by_axis[axis] = torch.from_numpy(places[own][sort].reshape(size, -1))
        return by_axis

    def _resolved(self) -> np.ndarray:
        """Return the group of each channel, -1 without one."""
        atoms, changed, relations = self.atoms, True, list[_Relation]()
        while changed:
            relations = _of_several([_Relation(atoms, each.members, each.groups) for each in atoms.memberships])
            colours = self._colours()
            changed = any(each.simplified(atoms, colours) for each in relations) or _reconciled(atoms, relations)
        parent = np.full(len(atoms.root), -1)
        for each in relations:
            parent[each.members] = np.where(parent[each.members] < 0, each.groups, parent[each.members])
        changed = True
        while changed:
            pinned = atoms.find(torch.arange(len(atoms.root))).numpy()[atoms.pinned]
            led = parent[pinned]
            led = led[led >= 0]
            changed = bool((~atoms.pinned[led]).any())
            atoms.pinned[led] = True
        return parent

    def _colours(self) -> np.ndarray:
        """Return a colour for each channel, from its atoms; for a pinned channel, from its oldest atom only."""
        atoms = self.atoms
        roots = atoms.find(torch.arange(len(atoms.root))).numpy()
        colours, pinned = np.zeros(len(roots), np.uint64), np.zeros(len(roots), bool)
        np.add.at(colours, roots, scrambled(atoms.colour))
        np.logical_or.at(pinned, roots, atoms.pinned)
        return scrambled(np.where(pinned, atoms.block + np.uint64(1), colours))

    def _spread(self, colours: np.ndarray) -> np.ndarray:
        """Refine colours: members of groups with different colours differ, and groups with different members differ."""
        members = np.flatnonzero(self.parent >= 0)
        members = members[self.roots[members] == members]
        groups = self.parent[members]
        for _ in range(ROUNDS):
            new = colours.copy()
            np.add.at(new, groups, scrambled(colours[members]))
            new[members] += scrambled(colours[groups] + np.uint64(1))
            colours = scrambled(new)
        return colours

    def _drawn(self, wanted: np.ndarray) -> list[Drawn]:
        """Return axes of the wanted channels, oldest first, then those of groups without a tensor."""
        above, new = [], wanted
        while len(new):
            new = np.setdiff1d(np.unique(self.parent[new][self.parent[new] >= 0]), wanted)
            above.append(new)
            wanted = np.concatenate([wanted, new])
        first, rest = wanted[: len(wanted) - sum(map(len, above))], np.concatenate([*above, np.empty(0, np.int64)])
        lines = [line for part in (first, rest) for line in self._of_one_colour(part)]
        index = {channel: axis for axis, line in enumerate(lines) for channel in line.tolist()}
        pinned = np.zeros(len(self.roots), bool)
        np.logical_or.at(pinned, self.roots, self.atoms.pinned)
        drawn = []
        for line in lines:
            led = self.parent[line]
            parent = index[int(led[0])] if led[0] >= 0 else None
            members = None if parent is None else np.searchsorted(lines[parent], led)
            drawn.append(Drawn(line, bool(pinned[line[0]]), parent, members))
        return drawn

    def _of_one_colour(self, channels: np.ndarray) -> list[np.ndarray]:
        channels = np.sort(channels)
        by_colour: dict[int, list[int]] = {}
        for channel, colour in zip(channels.tolist(), self.colours[channels].tolist(), strict=True):
            by_colour.setdefault(colour, []).append(channel)
        return [np.array(line) for line in by_colour.values()]


class _Relation:
    """Channels and their groups, by representatives."""

    def __init__(self, atoms: Atoms, members: np.ndarray, groups: np.ndarray) -> None:
        pairs = atoms.find(torch.from_numpy(np.stack([members, groups]))).numpy()
        pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
        self.members, self.groups = pairs

    def simplified(self, atoms: Atoms, colours: np.ndarray) -> bool:
        """Simplify the relation, and return whether anything changed.

        If a channel is in several groups, these groups stop moving. If members are alone in their groups, the two
        become one.
        """
        if not len(self.members):
            return False
        same = np.flatnonzero(self.members[1:] == self.members[:-1])
        if len(same):
            _stop(atoms, np.concatenate([self.groups[same], self.groups[same + 1]]))
            return True
        kinds = np.stack([self.groups.astype(np.uint64), colours[self.members]])
        if np.unique(kinds, axis=1).shape[1] == len(self.members):
            _tie(atoms, self.members, self.groups)
            return True
        return False

    def reconciled(self, other: "_Relation", atoms: Atoms) -> bool:
        """Reconcile two partitions of the same channels, and return whether anything changed.

        Either the groups of both become one, or they stop moving.
        """
        if not self._may_meet(other):
            return False
        _, one, two = np.intersect1d(self.members, other.members, assume_unique=True, return_indices=True)
        pairs = np.unique(np.stack([self.groups[one], other.groups[two]]), axis=1)
        if not (pairs[0] != pairs[1]).any():
            return False
        if all(len(np.unique(side)) == pairs.shape[1] for side in pairs):
            _tie(atoms, *pairs)
        else:
            _stop(atoms, pairs.flatten())
        return True

    def _may_meet(self, other: "_Relation") -> bool:
        """Return whether the ranges of the sorted members overlap, which is cheaper to know than the common members."""
        if not (len(self.members) and len(other.members)):
            return False
        return bool(self.members[0] <= other.members[-1] and other.members[0] <= self.members[-1])


def _reconciled(atoms: Atoms, relations: list[_Relation]) -> bool:
    return any(one.reconciled(other, atoms) for index, one in enumerate(relations) for other in relations[:index])


def _of_several(relations: list[_Relation]) -> list[_Relation]:
    """Leave out relations with a single group that no other relation shares: they have no effect."""
    groups = [np.unique(each.groups) for each in relations]
    every, times = np.unique(np.concatenate([np.empty(0, np.int64), *groups]), return_counts=True)
    shared = set(every[times > 1].tolist())
    return [each for each, own in zip(relations, groups, strict=True) if len(own) > 1 or shared.intersection(own.tolist())]


def _stop(atoms: Atoms, groups: np.ndarray) -> None:
    """Stop groups from moving: the members of each group get their own colour."""
    for group in np.unique(groups):
        token = atoms.token()
        atoms.colour[group] += token
        for index, each in enumerate(atoms.memberships):
            own = atoms.find(torch.from_numpy(each.groups)).numpy() == group
            atoms.colour[np.unique(each.members[own])] += token
            atoms.memberships[index] = Membership(each.members[~own], each.groups[~own])


def _tie(atoms: Atoms, one: np.ndarray, other: np.ndarray) -> None:
    atoms.tie(torch.from_numpy(one), torch.from_numpy(other))
