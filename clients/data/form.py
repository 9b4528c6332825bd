"""The form of a network's inputs and outputs: the shape of an example, and the numbers that the network returns for it."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.conf.errors import UserError

IMAGE, FEATURES, SEQUENCE, TOKENS, ARRAY = KINDS = ("image", "features", "sequence", "tokens", "array")
DIMENSIONS = {IMAGE: 3, FEATURES: 1, SEQUENCE: 2, TOKENS: 1}
MOST_VOCABULARY = 1_000_000
PADDING = 0  # the token that fills sequences up to their common length


@dataclass(frozen=True)
class Form:
    """The form of one example and of a network's outputs for it.

    Attributes:
        kind: One of KINDS.
        shape: Of one input: image (c, h, w), features (f,), sequence (t, f), tokens (t,), array (any).
        outputs: Numbers that the network returns for an example: classes, labels or predicted numbers.
        vocabulary: tokens: number of different tokens, with PADDING. 0: other kinds.
        each_step: The network returns `outputs` numbers for each step of a sequence, such as scores of the next token.
    """

    kind: str
    shape: tuple[int, ...]
    outputs: int
    vocabulary: int = 0
    each_step: bool = False

    @classmethod
    def images(cls, channels: int, size: int, outputs: int) -> "Form":
        """Return the form of square images."""
        return cls(IMAGE, (channels, size, size), outputs)

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> "Form":
        """Return the form that `plain` converted. Raises TypeError, KeyError or ValueError for other values."""
        return cls(**{**values, "shape": tuple(int(part) for part in values["shape"])})

    def plain(self) -> dict[str, Any]:
        """Return the form as values for JSON."""
        return {**asdict(self), "shape": list(self.shape)}

    @property
    def channels(self) -> int:
        """image: the number of channels."""
        return self.shape[0]

    @property
    def height(self) -> int:
        """image: the number of rows."""
        return self.shape[1]

    @property
    def width(self) -> int:
        """image: the number of columns."""
        return self.shape[2]

    @property
    def length(self) -> int:
        """sequence, tokens: the number of steps."""
        return self.shape[0]

    @property
    def features(self) -> int:
        """features, sequence: the numbers of each example or step; other kinds: all numbers of an example."""
        return self.shape[-1] if self.kind in (FEATURES, SEQUENCE) else self.numbers

    @property
    def numbers(self) -> int:
        """The numbers of an example."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    def zeros(self, count: int) -> Tensor:
        """Return a batch of zeros, [count, *shape]: int64 tokens, or float32."""
        return torch.zeros(count, *self.shape, dtype=torch.int64 if self.kind == TOKENS else torch.float32)

    def random(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return a batch of random inputs, [count, *shape]: tokens without padding, or float32 from 0 to 1."""
        if self.kind == TOKENS:
            return torch.randint(1, max(2, self.vocabulary), (count, *self.shape), generator=generator)
        return torch.rand(count, *self.shape, generator=generator)

    def takes(self, *kinds: str, what: str) -> None:
        """Raise UserError unless the inputs are of one of these kinds. `what` names the network or option."""
        if self.kind not in kinds:
            raise UserError(f"{what}: takes {' or '.join(kinds)} as inputs, but the data are {self}")

    def __str__(self) -> str:
        by = " x ".join(map(str, self.shape))
        named = {IMAGE: f"images of {by}", FEATURES: f"{self.shape[-1]} features", TOKENS: f"{by} tokens"}
        steps = f"sequences of {self.length} steps of {self.features} features" if self.kind == SEQUENCE else ""
        return named.get(self.kind) or steps or f"arrays of {by}"
