"""How much a site counts that says how many images it has: nobody can check it, and means are weighted by it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

MOST_TIMES = 10  # as many as the median of the other sites


def capped(sizes: Mapping[str, int]) -> dict[str, int]:
    """By site how many of its images count: at most MOST_TIMES the median of what the other sites say."""
    ordered = sorted(sizes.values())
    return {site: min(size, int(MOST_TIMES * _median_without(ordered, size))) if len(ordered) > 1 else size
            for site, size in sizes.items()}  # fmt: skip


def _median_without(ordered: Sequence[int], size: int) -> float:
    """The median of sizes, in their order, without one that is this large."""
    gone, rest = bisect_left(ordered, size), len(ordered) - 1

    def at(place: int) -> int:
        return ordered[place + (place >= gone)]

    return (at((rest - 1) // 2) + at(rest // 2)) / 2
