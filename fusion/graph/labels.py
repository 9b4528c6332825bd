"""Labels: which channel each entry of a tensor belongs to, and which channels of several tensors are tied.

A dimension of a weight creates an atom for each of its entries. Tensors computed from it carry the atoms, by the same
operations that move their entries. Tied atoms are one channel. Channels can be members of groups that move as a
whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NONE, STILL = -1, -2  # no atom: a constant, equal for all channels; a value of its own that never moves

_SEED = 20_240_229  # for the colours; any number works


@dataclass(frozen=True, eq=False)
class Value:
    """The labels of a tensor with this shape.

    `factors`: int64 label tensors with its number of dimensions. Each dimension is as large as the tensor's, or 1 for
    equal labels. Several factors move independently. `even`: dimensions along which all entries are equal.
    """

    factors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    even: frozenset[int]


def value_of(factors: Iterable[Tensor], shape: Sequence[int], even: Iterable[int] = ()) -> Value:
    """Return a Value with these labels. Dimensions of size 1 are added to `even`."""
    even_dims = frozenset(even) | {dim for dim, size in enumerate(shape) if size == 1}
    return Value(tuple(factors), tuple(shape), even_dims)


def varied(factor: Tensor) -> frozenset[int]:
    """Return the dimensions along which a factor's labels differ."""
    return frozenset(dim for dim, size in enumerate(factor.shape) if size > 1)


@dataclass(frozen=True, eq=False)
class Membership:
    """Atoms `members` [n] belong to the groups `groups` [n], which are atoms, too."""

    members: np.ndarray
    groups: np.ndarray


class Atoms:
    """All atoms, by number, with ties (union-find), memberships and colours. One colour: equal use in all tensors."""

    def __init__(self) -> None:
        self.root = np.empty(0, np.int64)
        self.place = np.empty(0, np.int64)  # order among the entries of one channel; -1: unknown
        self.colour = np.empty(0, np.uint64)
        self.block = np.empty(0, np.uint64)  # the initial colour
        self.pinned = np.empty(0, bool)
        self._held = {
            name: np.zeros(1024, vars(self)[name].dtype) for name in vars(self)
        }  # buffers; the attributes are their fronts
        self.memberships: list[Membership] = []
        self._ties: list[tuple[np.ndarray, np.ndarray, np.uint64]] = []
        self._random = np.random.default_rng(_SEED)

    def new(self, count: int, pinned: bool = False) -> Tensor:
        """Return `count` new atoms of one colour, int64 [count]."""
        first, total, token = len(self.root), len(self.root) + count, self.token()
        for name, value in (("root", 0), ("place", -1), ("colour", token), ("block", token), ("pinned", pinned)):
            buffer = self._held[name]
            if total > len(buffer):
                buffer = self._held[name] = np.resize(buffer, 2 * total)
            buffer[first:total] = value
            setattr(self, name, buffer[:total])
        self.root[first:] = np.arange(first, total)
        return torch.arange(first, total)

    def token(self) -> np.uint64:
        """Return a random number, the same in every run."""
        return self._random.integers(1, 2**63, dtype=np.uint64)

    def find(self, atoms: Tensor) -> Tensor:
        """Return the representative (the oldest atom) of each atom's channel; negative labels stay."""
        labels = atoms.numpy()
        known = labels >= 0
        if known.all():
            return torch.from_numpy(self._roots(labels))
        result = labels.copy()
        result[known] = self._roots(labels[known])
        return torch.from_numpy(result)

    def _roots(self, atoms: np.ndarray) -> np.ndarray:
        """Return what `find` does, of atoms alone."""
        roots = self.root[atoms]
        while True:
            up = self.root[roots]
            if (up == roots).all():
                break
            roots = up
        self.root[atoms] = roots
        return roots

    def tie(self, one: Tensor, other: Tensor) -> None:
        """Record that two label tensors of one shape name the same channels, by entry. Pin a label that meets STILL."""
        a, b = self._met(one, other)
        for mine, theirs in ((a, b), (b, a)):
            unset = self.place[mine] < 0
            self.place[mine[unset]] = self.place[theirs[unset]]
        self._ties.append((a, b, self.token()))
        while True:
            x, y = self._roots(a), self._roots(b)
            apart = x != y
            if not apart.any():
                return
            low, high = np.minimum(x, y)[apart], np.maximum(x, y)[apart]
            np.minimum.at(self.root, high, low)

    def _met(self, one: Tensor, other: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of atoms in two label tensors of one shape. Pin a label that meets STILL."""
        a, b = one.flatten().numpy(), other.flatten().numpy()
        self.pinned[a[(b == STILL) & (a >= 0)]] = True
        self.pinned[b[(a == STILL) & (b >= 0)]] = True
        both = (a >= 0) & (b >= 0)
        return a[both], b[both]

    def pin(self, atoms: Tensor) -> None:
        """Record that the channels of these atoms never move."""
        labels = atoms.flatten().numpy()
        self.pinned[labels[labels >= 0]] = True

    def is_pinned(self, factor: Tensor) -> bool:
        """Return whether no channel in a factor can move, as far as known now."""
        labels = np.unique(factor.numpy())
        labels = labels[labels >= 0]
        return bool(self.pinned[labels].all() or self.pinned[self.find(torch.from_numpy(labels)).numpy()].all())

    def mark(self, factor: Tensor) -> None:
        """Record in the atoms' colours that they occur in this tensor, and how often. Equal occurrence: equal colour."""
        labels = factor.numpy().ravel()
        np.add.at(self.colour, labels[labels >= 0], self.token())

    def belong(self, members: Tensor, groups: Tensor) -> None:
        """Record that each atom in `members` moves only with the atom at its place in `groups`.

        Both are int64 label tensors of one shape. Pairs with a negative label (no atom) are left out.
        """
        pairs = torch.stack([members.flatten(), groups.flatten()])
        pairs = pairs[:, (pairs >= 0).all(dim=0)].unique(dim=1).numpy()
        self.memberships.append(Membership(pairs[0], pairs[1]))

    def refined(self) -> np.ndarray:
        """Return a colour for each atom: uint64 [atoms].

        Two atoms have the same colour if they occur in the same way in the network's tensors (`mark`), and are tied to atoms
        of the same colours. This is repeated until no more colours are distinguished (Weisfeiler and Leman 1968).
        """
        colours, count = self.colour, 0
        sizes = [len(one) for one, _, _ in self._ties]
        one, other = (np.concatenate([tie[side] for tie in self._ties]) for side in (0, 1))
        token = np.repeat(np.array([tie[2] for tie in self._ties], np.uint64), sizes)
        while (colour_count := len(np.unique(colours))) > count:
            count, new = colour_count, scrambled(colours)
            np.add.at(new, one, scrambled(colours[other] + token))
            np.add.at(new, other, scrambled(colours[one] ^ token))
            colours = new
        return colours

    def compressed(self, factor: Tensor) -> Tensor:
        """Return the factor with size 1 in dimensions along which channels and the order of their entries do not vary."""
        roots = self.find(factor)
        for dim in range(factor.ndim):
            if factor.shape[dim] == 1:
                continue
            if bool((roots == roots.narrow(dim, 0, 1)).all()) and self._alike(factor, dim):
                factor, roots = factor.narrow(dim, 0, 1), roots.narrow(dim, 0, 1)
        return factor

    def _alike(self, factor: Tensor, dim: int) -> bool:
        """Return whether the order along a dimension, if any, is the same for all channels."""
        places = torch.from_numpy(np.where(factor.numpy() >= 0, self.place[np.maximum(factor.numpy(), 0)], -1))
        line = places
        for other in range(factor.ndim):
            if other != dim:
                line = line.narrow(other, 0, 1)
        return bool((places == places.narrow(dim, 0, 1)).all()) or bool((places == line).all())

    def repeated(self, factor: Tensor) -> bool:
        """Return whether a channel has several entries in the factor."""
        roots = self.find(factor)
        roots = roots[roots >= 0]
        return len(roots.unique()) < roots.numel()

    def ordered(self, factor: Tensor, positions: Tensor) -> Tensor:
        """Return the factor with a new atom for each entry, tied to its channel. `positions` order a channel's entries."""
        for dim, size in enumerate(factor.shape):
            positions = positions.narrow(dim, 0, size)
        known = factor >= 0
        atoms, where = factor[known], positions[known]
        before = torch.from_numpy(self.place[atoms.numpy()])
        order = torch.stack([before, where]).unique(dim=1, return_inverse=True)[1]
        pairs, inverse = torch.stack([atoms, order]).unique(dim=1, return_inverse=True)
        fine = self.new(pairs.shape[1])
        self.place[fine.numpy()] = pairs[1].numpy()
        self.tie(fine, pairs[0])
        self.pin(fine[torch.from_numpy(self.pinned[pairs[0].numpy()])])
        result = factor.clone()
        result[known] = fine[inverse]
        return result

    def link(self, one: Tensor, other: Tensor) -> Tensor:
        """Link the labels of two operands of an elementwise operation, and return the labels of the result.

        Channels are tied; or, if one operand has several channels for a channel of the other, become its members.
        """
        one, other = torch.broadcast_tensors(one, other)
        a, b = (torch.from_numpy(met) for met in self._met(one, other))
        correspondence = self._correspondence(a, b)
        memberships = {"left": (a, b), "right": (b, a)}.get(correspondence)
        if memberships is None or self._are_parts(*memberships):
            self.tie(one, other)
        elif correspondence == "left":
            self.belong(a, b)
        else:
            self.belong(b, a)
            one, other = other, one
        return self.compressed(torch.where(one >= 0, one, other))

    def _are_parts(self, members: Tensor, groups: Tensor) -> bool:
        """Return whether no group has two members from one block: concatenated parts of a tensor, not heads."""
        pairs = torch.stack([self.find(groups), members]).unique(dim=1)
        kinds = np.stack([pairs[0].numpy().astype(np.uint64), self.block[pairs[1].numpy()]])
        return np.unique(kinds, axis=1).shape[1] == pairs.shape[1]

    def slides(self, factor: Tensor, dim: int) -> bool:
        """Return whether channels made by one `new` lie along a dimension, not only concatenated parts of a tensor."""
        lines = self.find(factor).movedim(dim, -1).flatten(0, -2).numpy()
        row = np.broadcast_to(np.arange(len(lines), dtype=np.uint64)[:, None], lines.shape)
        known = lines >= 0
        lines, row = lines[known], row[known]
        kinds = np.unique(np.stack([row, self.block[lines]]), axis=1).shape[1]
        return kinds < np.unique(np.stack([row, lines.astype(np.uint64)]), axis=1).shape[1]

    def correspondence(self, one: Tensor, other: Tensor) -> str:
        """Return how the channels of two factors correspond.

        "same": one to one. "left": several of `one` to each of `other`. "right": the other way round. "many": several
        to several.
        """
        one, other = torch.broadcast_tensors(one, other)
        both = (one >= 0) & (other >= 0)
        return self._correspondence(one[both], other[both])

    def _correspondence(self, a: Tensor, b: Tensor) -> str:
        """Return what `correspondence` does, of pairs of atoms [n] and [n]."""
        return "same" if _ways(a, b) == "same" else _ways(self.find(a), self.find(b))


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number, one to one (Steele, Lea and Flood 2014, SplitMix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _ways(a: Tensor, b: Tensor) -> str:
    """Return the correspondence of labels [n] and [n], none negative."""
    sides = (a.numpy(), b.numpy())
    pairs = len(np.unique(sides[0] << 32 | sides[1]))
    left, right = (len(np.unique(side)) == pairs for side in sides)
    return "same" if left and right else "left" if left else "right" if right else "many"
