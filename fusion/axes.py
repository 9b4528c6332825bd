"""From atoms to axes: which channels are interchangeable, and in which groups they move."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusion.labels import Atoms
from fusion.tracing import WiringError

ROUNDS = 4  # of colours passed on between groups and members


@dataclass(frozen=True, eq=False)
class Drawn:
    """An axis in the making. channels: [size], representatives; members: [size], places of the channels' groups in the
    axis `parent`."""

    channels: np.ndarray
    fixed: bool
    parent: int | None
    members: np.ndarray | None


class Channels:
    """The channels of a walk that is over: groups resolved, channels of one colour collected in axes."""

    def __init__(self, atoms: Atoms, wanted: np.ndarray) -> None:
        """wanted: atoms that lie on tensors of the state."""
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

    def split(self, entries: Tensor) -> dict[int, Tensor]:
        """Of labels in a row, those of each axis: int64 [size, r], the places of each channel's r entries."""
        labels = entries.numpy()
        places = np.flatnonzero(labels >= 0)
        labels = labels[places]
        roots = self.roots[labels]
        axes, order = self.axis_of[roots], self.atoms.place[labels]
        found = {}
        for axis in dict.fromkeys(axes.tolist()):
            if axis < 0:
                continue
            own = axes == axis
            sort = np.lexsort((places[own], order[own], self.place_in[roots[own]]))
            counts = np.bincount(self.place_in[roots[own]])
            size = len(self.axes[axis].channels)
            if len(counts) == size and (counts == counts[0]).all():
                found[axis] = torch.from_numpy(places[own][sort].reshape(size, -1))
        return found

    def _resolved(self) -> np.ndarray:
        """The group of each channel, -1 for none; raises WiringError where groups contradict each other."""
        atoms = self.atoms
        while True:
            relations = [_Relation(atoms, each.members, each.groups, each.place) for each in atoms.memberships]
            relations = _of_several(relations)
            colours = self._colours()
            if not any(each.simplified(atoms, colours) for each in relations) and not self._compared(relations):
                break
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

    def _compared(self, relations: list["_Relation"]) -> bool:
        """Whether two partitions of the same channels were made one, or one finer than the other was put into it."""
        for index, one in enumerate(relations):
            for other in relations[:index]:
                if one.compared(other, self.atoms):
                    return True
        return False

    def _colours(self) -> np.ndarray:
        """A colour for each channel: of the atoms in it; of a pinned one, of the oldest of them only."""
        atoms = self.atoms
        roots = atoms.find(torch.arange(len(atoms.root))).numpy()
        colours, pinned = np.zeros(len(roots), np.uint64), np.zeros(len(roots), bool)
        np.add.at(colours, roots, _mixed(atoms.colour))
        np.logical_or.at(pinned, roots, atoms.pinned)
        return _mixed(np.where(pinned, atoms.block + np.uint64(1), colours))

    def _spread(self, colours: np.ndarray) -> np.ndarray:
        """Members of groups of different colours are different, and so are groups of different members."""
        members = np.flatnonzero(self.parent >= 0)
        members = members[self.roots[members] == members]
        groups = self.parent[members]
        for _ in range(ROUNDS):
            new = colours.copy()
            np.add.at(new, groups, _mixed(colours[members]))
            new[members] += _mixed(colours[groups] + np.uint64(1))
            colours = _mixed(new)
        return colours

    def _drawn(self, wanted: np.ndarray) -> list[Drawn]:
        """Axes of the wanted channels, oldest first, then those of groups that have no tensor."""
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
        found: dict[int, list[int]] = {}
        for channel, colour in zip(channels.tolist(), self.colours[channels].tolist(), strict=True):
            found.setdefault(colour, []).append(channel)
        return [np.array(line) for line in found.values()]


class _Relation:
    """Channels and their groups, by representatives."""

    def __init__(self, atoms: Atoms, members: np.ndarray, groups: np.ndarray, place: str) -> None:
        self.place = place
        pairs = atoms.find(torch.from_numpy(np.stack([members, groups]))).numpy()
        pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
        self.members, self.groups = pairs

    def simplified(self, atoms: Atoms, colours: np.ndarray) -> bool:
        """Whether groups were made one that have a member in common, or members the group that they are alone in."""
        if not len(self.members):
            return False
        same = np.flatnonzero(self.members[1:] == self.members[:-1])
        if len(same):
            _tie(atoms, self.groups[same], self.groups[same + 1])
            return True
        kinds = np.stack([self.groups.astype(np.uint64), colours[self.members]])
        if len(np.unique(kinds, axis=1).T) == len(self.members):
            _tie(atoms, self.members, self.groups)
            return True
        return False

    def compared(self, other: "_Relation", atoms: Atoms) -> bool:
        """Whether the two partitions of common members were reconciled."""
        common, one, two = np.intersect1d(self.members, other.members, assume_unique=True, return_indices=True)
        if not len(common):
            return False
        pairs = np.unique(np.stack([self.groups[one], other.groups[two]]), axis=1)
        pairs_apart = pairs[:, pairs[0] != pairs[1]]
        if not pairs_apart.size:
            return False
        counts = [len(np.unique(side)) for side in pairs]
        if counts[0] == counts[1] == pairs.shape[1]:
            _tie(atoms, *pairs)
            return True
        raise WiringError(f"{self.place}: {counts[0]} groups of channels that another layer ({other.place}) puts into "
                          f"{counts[1]} other groups; takes one number of groups, try the same for both")  # fmt: skip


def _of_several(relations: list[_Relation]) -> list[_Relation]:
    """Without those of one group that no other has members of: it says nothing."""
    found = []
    for each in relations:
        groups = np.unique(each.groups)
        shared = any(other is not each and np.isin(groups, other.groups).any() for other in relations)
        if len(groups) > 1 or (len(groups) and shared):
            found.append(each)
    return found


def _tie(atoms: Atoms, one: np.ndarray, other: np.ndarray) -> None:
    atoms.tie(torch.from_numpy(one), torch.from_numpy(other))


def _mixed(colours: np.ndarray) -> np.ndarray:
    """Numbers scrambled one to one (Steele, Lea and Flood 2014, SplitMix64)."""
    mixed = colours + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
