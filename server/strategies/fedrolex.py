"""FedRolex (Alam et al. 2022): narrow networks cycle through all channels of the reference."""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.in_parts import InParts


@STRATEGIES.register("fedrolex")
@dataclass(frozen=True)
class FedRolex(InParts):
    """FedRolex (Alg. 1): every entry becomes the mean over the sites that held it in this round.

    In round t, a network with n channels holds the reference's channels (0, ..., n - 1) - t, modulo their number.
    """

    fresh: ClassVar[bool] = True

    def turn(self, number: int) -> int:
        return number
