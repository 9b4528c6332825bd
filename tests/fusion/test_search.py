"""Coefficients that score highest: all points of a small grid, or a climb between bounds that never ends below its start."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.conf.errors import UserError
from fedloom.fusion.search import MAX_POINTS, best_on_grid, climb

LOW, HIGH = 0.0, 1.5
inside = st.floats(LOW, HIGH)


class Counted:
    """A quadratic with its peak somewhere, that notes where it was looked at."""

    def __init__(self, peak: Sequence[float]) -> None:
        self.peak, self.points = list(peak), []

    def __call__(self, point: Sequence[float]) -> float:
        self.points.append(list(point))
        return -sum((one - other) ** 2 for one, other in zip(point, self.peak, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.lists(st.floats(-1, 2), min_size=1, max_size=4, unique=True), st.data())
def test_the_best_point_of_a_grid_is_that_of_all_points_and_of_equal_ones_the_first(number, steps, data):
    points = list(itertools.product(steps, repeat=number))
    scores = data.draw(st.lists(st.integers(0, 3), min_size=len(points), max_size=len(points)))
    score = dict(zip(points, scores, strict=True))
    assert best_on_grid(lambda point: score[tuple(point)], steps, number) == list(points[scores.index(max(scores))])


def test_a_grid_of_too_many_points_is_refused_before_any_is_looked_at():
    score, steps = Counted([0.5] * 4), [step / 10 for step in range(11)]
    with pytest.raises(UserError, match=f"a grid of 11 steps for 4 coefficients has more than {MAX_POINTS} points"):
        best_on_grid(score, steps, 4)
    assert score.points == []
    assert best_on_grid(Counted([0.5] * 3), steps, 3) == [0.5] * 3  # 1331 points


@settings(deadline=None, max_examples=40)
@given(st.lists(inside, min_size=1, max_size=3), st.data())
def test_a_climb_finds_the_peak_of_a_quadratic(start, data):
    score = Counted([data.draw(inside) for _ in start])
    found = climb(score, start, LOW, HIGH, 1000)
    assert found == pytest.approx(score.peak, abs=0.05)


@settings(deadline=None, max_examples=40)
@given(st.lists(inside, min_size=1, max_size=4), st.integers(1, 60), st.randoms(use_true_random=False))
def test_a_climb_gives_the_best_point_that_it_saw_none_worse_than_its_start_and_all_within_the_bounds(start, most, random):
    seen: dict[tuple[float, ...], float] = {}

    def score(point: Sequence[float]) -> float:
        return seen.setdefault(tuple(point), random.random())

    found = climb(score, start, LOW, HIGH, most)
    assert all(LOW <= one <= HIGH for point in seen for one in point)
    assert next(iter(seen)) == tuple(start)
    assert seen[tuple(found)] == max(seen.values()) >= seen[tuple(start)]


@pytest.mark.parametrize("most", [1, 10, 50])
def test_a_climb_looks_at_about_so_many_points(most):
    score = Counted([0.3, 0.8, 1.1])
    climb(score, [0.5] * 3, LOW, HIGH, most)
    assert len(score.points) <= most + 2


@pytest.mark.parametrize("start", [-1.0, 2.0])
def test_a_climb_from_outside_its_bounds_ends_within_them(start):
    score = Counted([start, start])
    assert all(LOW <= one <= HIGH for one in climb(score, [start, start], LOW, HIGH, 100))
