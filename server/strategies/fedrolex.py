"""FedRolex (Alam et al. 2022): narrow networks take turns with all of the reference's channels."""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.in_parts import InParts


@STRATEGIES.register("fedrolex")
@dataclass(frozen=True)
class FedRolex(InParts):
    """In round t a network of n channels has those at (0, ..., n - 1) - t, modulo their number, of the reference; every
    entry becomes the mean over those who had it in this round (Alg. 1)."""

    fresh: ClassVar[bool] = True

    def turn(self, number: int) -> int:
        return number
