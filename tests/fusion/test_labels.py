"""The mathematics of labels: in random networks of layers, moves, sums, products and groups any permutation that the axes
allow leaves the function as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.fusion.graph.channels import wire
from fedloom.fusion.graph.grouped import dense, in_groups
from fedloom.fusion.graph.labels import Atoms
from tests.fusion.families import filled, sequences
from tests.fusion.test_families import difference, permuted_copy

WIDTH, LENGTH = 8, 4


class Step(nn.Module):
    """[n, 8, 4] to the same shape, one of the ways below."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1, bias=False)
        build = MODULES.get(kind)
        self.extra = build() if build else None
        if kind in NONE:
            self.one = None
        if kind in (*ONE, *NONE):
            self.two = None

    def forward(self, x: Tensor) -> Tensor:
        return STEPS[self.kind](self, x)


def shuffled(s: Any, x: Tensor) -> Tensor:
    return x.view(-1, 2, 4, LENGTH).transpose(1, 2).reshape(-1, WIDTH, LENGTH)


def halves(s: Any, x: Tensor) -> Tensor:
    first, second = s.one(x).chunk(2, dim=1)
    return torch.cat([second, first.relu()], dim=1)


def mixed_up(s: Any, x: Tensor) -> Tensor:
    """Channels and positions in one dimension, in an order that differs by channel."""
    return s.extra(x.flatten(1).view(-1, WIDTH * 2, 2).transpose(1, 2).flatten(1)).view(-1, WIDTH, LENGTH)


def folded(s: Any, x: Tensor) -> Tensor:
    first, second = x.split([4, 4], 1)
    return s.one(torch.cat([first + second.flip(1), second], 1))


def attended(s: Any, x: Tensor) -> Tensor:
    q, k, v = (part.view(-1, 2, 4, LENGTH).transpose(2, 3) for part in (s.one(x), s.two(x), x))
    found = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(2, 3).reshape(-1, WIDTH, LENGTH)
    return s.extra(found)


def pieces(s: Any, x: Tensor) -> Tensor:
    """Half of the channels shifted along positions: the halves are not alike."""
    return torch.cat([x[:, ::2].roll(1, 2), x[:, 1::2]], 1)


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda s, x: s.one(x).relu(),
    "residual": lambda s, x: x + s.two(F.gelu(s.one(x))),
    "gated": lambda s, x: s.one(x) * torch.sigmoid(s.two(x.mean(2, keepdim=True))),
    "two branches": lambda s, x: s.one(x) - s.two(x),
    "shuffled": shuffled,
    "halves": halves,
    "mixed up": mixed_up,
    "folded": folded,
    "pieces": pieces,
    "attended": attended,
    "grouped": lambda s, x: s.extra(x).relu(),
    "group norm": lambda s, x: s.extra(x),
    "other groups": lambda s, x: s.extra(x),
    "layer norm": lambda s, x: s.extra(x.transpose(1, 2)).transpose(1, 2),
    "positions": lambda s, x: x + s.extra(x.transpose(1, 2).flatten(0, 1)).view(-1, LENGTH, WIDTH).transpose(1, 2),
    "rolled": lambda s, x: s.one(F.pad(x.roll(1, 1)[:, 1:], (0, 0, 0, 1))),
    "outer": lambda s, x: x + torch.einsum("ncl,ndl->ncd", s.one(x), s.two(x)).mean(2, keepdim=True),
    "masked": lambda s, x: s.one(x) * torch.arange(1, LENGTH + 1) + torch.tril(torch.ones(LENGTH, LENGTH))[-1],
    "uneven": lambda s, x: s.one(x) * torch.arange(1, WIDTH + 1)[:, None],
}
# steps with one layer, and with none but its own
ONE = ("plain", "halves", "folded", "rolled", "masked", "uneven")
NONE = (
    "shuffled",
    "mixed up",
    "pieces",
    "grouped",
    "group norm",
    "other groups",
    "layer norm",
    "positions",
)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "mixed up": lambda: nn.Linear(WIDTH * LENGTH, WIDTH * LENGTH),
    "attended": lambda: nn.Conv1d(WIDTH, WIDTH, 1),
    "grouped": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "other groups": lambda: nn.GroupNorm(4, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "positions": lambda: nn.Linear(WIDTH, WIDTH),
}


class Random(nn.Module):
    def __init__(self, kinds: list[str], flat: bool) -> None:
        super().__init__()
        self.stem, self.steps, self.flat = nn.Conv1d(3, WIDTH, 1), nn.ModuleList(Step(kind) for kind in kinds), flat
        self.head = nn.Linear(WIDTH * (LENGTH if flat else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for step in self.steps:
            x = step(x)
        return self.head(x.flatten(1) if self.flat else x.mean(2))


@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=120, deadline=None)
def test_random_networks(kinds, flat, seed):
    network, inputs = filled(Random(kinds, flat), seed), sequences(3, 3, LENGTH)
    wiring = wire(network, inputs[:1])
    for draw in range(2):
        assert difference(permuted_copy(network, wiring, seed + draw), network, inputs) < 1e-9, kinds


@pytest.mark.parametrize("kind", STEPS)
def test_every_step_has_free_channels(kind):
    network, inputs = filled(Random(["plain", kind], False)), sequences(3, 3, LENGTH)
    wiring = wire(network, inputs[:1])
    assert sum(axis.size for axis in wiring.axes if not axis.fixed and axis.slots) >= WIDTH
    assert difference(permuted_copy(network, wiring), network, inputs) < 1e-9


def test_what_is_not_alike_is_not_an_axis():
    """Halves that are treated otherwise are axes of their own; what stands beside values of its own is fixed."""
    sizes = {}
    for kind in ("pieces", "uneven", "folded"):
        wiring = wire(filled(Random(["plain", kind], False)), sequences(1, 3, LENGTH))
        sizes[kind] = sorted(axis.size for axis in wiring.axes if not axis.fixed and axis.slots)
    assert sizes == {"pieces": [4, 4, 8], "uneven": [8, 8], "folded": [4, 8, 8]}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_grouped_weights_made_dense(groups, out, inputs):
    weight, x = torch.randn(groups * out, inputs, 3).double(), torch.randn(2, groups * inputs, 5).double()
    full = dense(weight, groups)
    torch.testing.assert_close(F.conv1d(x, full), F.conv1d(x, weight, groups=groups))
    assert torch.equal(in_groups(full, groups), weight)


@given(st.integers(2, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40))
def test_ties_are_an_equivalence(count, pairs):
    atoms = Atoms()
    labels = atoms.new(count)
    given_pairs = [(a % count, b % count) for a, b in pairs]
    for a, b in given_pairs:
        atoms.tie(labels[a : a + 1], labels[b : b + 1])
    together = Atoms()
    other = together.new(count)
    if given_pairs:
        ones, twos = torch.tensor(given_pairs).T
        together.tie(other[ones], other[twos])
    assert torch.equal(atoms.find(labels), together.find(other))
    assert all(atoms.find(labels)[a] == atoms.find(labels)[b] for a, b in given_pairs)
    assert (atoms.find(labels) <= labels).all()
