"""Draw curves as SVG, with classes instead of colours: the style sheet has both a light and a dark palette."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.conf.metrics import Facts
from fedloom.sims.desk.details import Curve

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 540, 240, 74, 14, 14, 34
MOST_CURVES = 8
STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: its place in the drawing, and its text."""

    place: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve: its name, the attribute `points` of a polyline, its last point and value."""

    name: str
    points: str
    end: tuple[float, float]
    last: str


@dataclass(frozen=True)
class Chart:
    """A drawing of curves over rounds, for the template `chart`."""

    title: str
    lines: list[Line]
    across: list[Tick]
    up: list[Tick]
    note: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def chart(title: str, curves: Mapping[str, Curve], metric: Facts) -> Chart | None:
    """Return a drawing of curves; None without points. Of many, the first MOST_CURVES are drawn, after the union."""
    named = sorted(((name, curve) for name, curve in curves.items() if curve), key=lambda one: one[0] != "union")
    shown = named[:MOST_CURVES]
    if not shown:
        return None
    rounds = [round for _, curve in shown for round, _ in curve]
    values = [value for _, curve in shown for _, value in curve]
    first, last = min(rounds), max(rounds)
    marks = _marks(min(values), max(values))
    low, high = marks[0], marks[-1]

    def x(round: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((round - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    lines = [
        Line(name, " ".join(f"{x(round):.1f},{y(value):.1f}" for round, value in curve),
             (x(curve[-1][0]), y(curve[-1][1])), metric.text(curve[-1][1]))
        for name, curve in shown
    ]  # fmt: skip
    note = f"The first {MOST_CURVES} of {len(named)} curves are drawn." if len(named) > MOST_CURVES else ""
    across = [Tick(x(round), str(round)) for round in _rounds(first, last)]
    return Chart(title, lines, across, [Tick(y(mark), metric.text(mark)) for mark in marks], note)


def _rounds(first: int, last: int) -> list[int]:
    """Return some round numbers of rounds, for the axis."""
    return [int(mark) for mark in _marks(first, last) if first <= mark <= last and mark == int(mark)] or [first]


def _marks(low: float, high: float) -> list[float]:
    """Return four to six round numbers that enclose the values."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    step = next(factor * size for factor in STEPS if factor * size >= span / 4)
    start, end = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(start, max(end, start + 1) + 1)]
