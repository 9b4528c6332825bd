"""Networks of a user that are refused before a run, each with its own reason."""

import pytest
import torch
from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import parse_name
from fedloom.conf import UserError


class Noisy(nn.Module):
    def __init__(self, classes: int, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(size * size, classes)

    def forward(self, images: torch.Tensor, *, scale: float = 1.0) -> object:
        if self.kind == "random":
            images = images + torch.randn_like(images)
        scores = self.head(images.flatten(1)) * 1.0 if self.kind == "scaled" else self.head(images.flatten(1))
        return (scores, scores) if self.kind == "two" else scores


class NamedAlone(Noisy):
    def forward(self, *, images: torch.Tensor) -> object:  # type: ignore[override]
        return super().forward(images)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("Noisy", "random", "other outputs for the same inputs in evaluation mode; remove random draws"),
     ("Noisy", "two", r"returns a tuple .*; return the scores alone$"),
     ("NamedAlone", "", r"; forward must take the inputs as its only argument$")],
)  # fmt: skip
def test_the_reason_for_a_refusal_is_the_fault(name: str, kind: str, message: str):
    with pytest.raises(UserError, match=message):
        parse_name(f"{__name__}:{name}:kind={kind or 'none'}", Form.images(1, 8, 10)).build()
