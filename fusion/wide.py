"""Exact sums of numbers of any usual size, and their mean and deviation: integers of more than 64 bits, in int64 parts.

A sum is an int64 tensor [parts, columns]. Part k counts in units of 2**(lowest + 32 k). So sums of several sites add up
exactly in any order, and a site can be subtracted again. The variance (n sum(x^2) - sum(x)^2) / n^2 follows from integers of
Python, so that nothing cancels.
"""

import math

import torch
from torch import Tensor

BITS = 32  # of a part
LOWEST, PARTS = -96, 5  # of sums of numbers: from 2**-96 to LARGEST. Squares have twice as many bits
LARGEST = 2.0 ** (LOWEST + BITS * PARTS)  # 1.8e19
CHUNK = 2**22  # numbers that are converted at once


def wide_sums(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact sums of each column and of its squares, int64 [PARTS, columns] and [2 PARTS, columns].

    Args:
        columns: float32 [n, columns], finite and smaller than LARGEST. Bits below 2**LOWEST are cut off.
    """
    sums = torch.zeros(PARTS, columns.shape[1], dtype=torch.int64)
    squares = torch.zeros(2 * PARTS, columns.shape[1], dtype=torch.int64)
    for rows in columns.split(max(1, CHUNK // max(1, columns.shape[1]))):
        numbers = rows.double()
        _add(sums, numbers.clone(), LOWEST)
        _add(squares, numbers.square_(), 2 * LOWEST)  # exact: float32 has 24 bits, float64 has 53
        carry(sums)
        carry(squares)
    return sums, squares


def _add(sums: Tensor, rest: Tensor, lowest: int) -> None:
    """Add numbers to sums, from the highest part to the lowest. Changes `rest`."""
    for part in reversed(range(len(sums))):
        unit = 2.0 ** (lowest + BITS * part)
        digits = (rest / unit).trunc_()
        rest.sub_(digits, alpha=unit)  # exact: removes the leading bits
        sums[part] += digits.to(torch.int64).sum(0)


def carry(sums: Tensor) -> None:
    """Bring all parts but the highest into the range from 0 to 2**BITS - 1, in place. The sums stay the same."""
    for part in range(len(sums) - 1):
        sums[part + 1] += sums[part] >> BITS
        sums[part] &= 2**BITS - 1


def integers(sums: Tensor) -> list[int]:
    """Return the sum of each column as an integer, in units of the lowest part."""
    return [sum(digit << BITS * part for part, digit in enumerate(column)) for column in sums.T.tolist()]


def mean_and_deviation(count: int, sums: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation (over n) of each column, float64 [columns], correct to the last digits.

    Raises:
        ValueError: No numbers have these sums.
    """
    if count < 1:
        raise ValueError("a sum of no examples has no mean")
    means, deviations = [], []
    for total, square in zip(integers(sums), integers(squares), strict=True):
        spread = count * square - total * total
        if spread < 0:
            raise ValueError("the sum of squares is smaller than the sum allows")
        means.append(total / (count << -LOWEST))
        deviations.append(math.sqrt(spread / (count * count << -2 * LOWEST)))
    return torch.tensor(means, dtype=torch.float64), torch.tensor(deviations, dtype=torch.float64)
