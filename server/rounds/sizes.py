"""How much a site counts that says how many images it has: nobody can check it, and means are weighted by it."""

import statistics
from collections.abc import Mapping

MOST_TIMES = 10  # as many as the median of the other sites


def capped(sizes: Mapping[str, int]) -> dict[str, int]:
    """By site how many of its images count: at most MOST_TIMES the median of what the other sites say."""
    found = {}
    for site, size in sizes.items():
        others = [other for name, other in sizes.items() if name != site]
        found[site] = min(size, int(MOST_TIMES * statistics.median(others))) if others else size
    return found
