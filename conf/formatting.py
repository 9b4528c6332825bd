"""Format numbers for people."""

import math

MILLION = 1e6


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 round, 2 rounds. `plural`: an irregular one (1 reply, 2 replies)."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def rounded(number: float, digits: int) -> str:
    """Return a number as text with `digits` significant digits: 900 for 897.34 and two. No exponent below a million."""
    short = float(f"{number:.{digits}g}")
    if abs(short) >= MILLION or not math.isfinite(short):
        return f"{short:.{digits}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(short)))) if short else 0
    return f"{short:.{places}f}"
