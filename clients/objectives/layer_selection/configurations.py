"""Transfer configurations: the groups of layers that a site shares (LASEM, Sec. 2 and 3.1)."""

import itertools
from collections.abc import Callable, Sequence

from fedloom.conf.errors import UserError

Configuration = tuple[int, ...]  # by group, from input to output: 1: shared, 0: the site's own
LEARNED = "learned"


def every(groups: int) -> list[Configuration]:
    """Return all 2^groups configurations in the order of binary numbers: from no layer shared to all shared."""
    return list(itertools.product((0, 1), repeat=groups))


def _top(groups: int, shared: int) -> Configuration:
    return (0,) * (groups - shared) + (1,) * shared


STATIC: dict[str, Callable[[int], Configuration]] = {
    "all": lambda groups: _top(groups, groups),
    "none": lambda groups: _top(groups, 0),
    "alternating": lambda groups: tuple(group % 2 for group in range(groups)),  # {2, 4} of four
}
COUNTED: dict[str, Callable[[int, int], Configuration]] = {
    "top": _top,
    "bottom": lambda groups, shared: _top(groups, shared)[::-1],
}


def named(text: str, groups: int, where: str) -> Configuration:
    """Return the configuration with this name: for each of `groups` groups of layers, 1 if it is shared, else 0.

    Names are all, none, alternating, top-K, bottom-K, only-2-4 (these groups, from 1), and quoted digits such as "0101".
    Raises UserError for another name.
    """
    if text in STATIC:
        return STATIC[text](groups)
    kind, _, number = text.partition("-")
    if kind == "only" and {*number.split("-")} <= {*map(str, range(1, groups + 1))}:
        return tuple(int(str(group) in number.split("-")) for group in range(1, groups + 1))
    if kind in COUNTED and number.isdecimal() and 0 < int(number) <= groups:
        return COUNTED[kind](groups, int(number))
    if text and not text.strip("01"):
        if len(text) != groups:
            raise UserError(f"{where}: '{text}' has {len(text)} digits, but there are {groups} groups of layers")
        return tuple(map(int, text))
    takes = (
        f"{LEARNED}, {', '.join(STATIC)}, top-K, bottom-K (K from 1 to {groups}), or groups by number, as in only-1-{groups}"
    )
    raise UserError(f"{where}: got '{text}', takes {takes}")


def shown(configuration: Sequence[int]) -> str:
    """Return a configuration as digits, from the input to the output, such as 0101."""
    return "".join(map(str, configuration))
