"""What cannot be wired is refused by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from fusion.channels import WiringError, wire
from tests.fusion.wirings import Dynamic, Merging, images


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.attention(x, x, x)[0]


MERGES = {
    "cat": lambda a, b, _: torch.cat([a, b], 1),
    "mul": lambda a, b, _: a * b,
    "einsum": lambda a, b, _: torch.einsum("nchw,ndhw->ncd", a, b),
    "matmul": lambda a, b, _: a @ b,
    "several outputs": lambda a, b, _: (a, b),
    "splits or joins": lambda a, b, _: (a + b).view(a.size(0), 2, -1),
    "batch": lambda a, b, _: (a + b).flatten(),
    "unbind": lambda a, b, _: (a + b).unbind(1)[0],
    "reaches channels": lambda a, b, _: F.pad(a + b, (0, 0, 0, 0, 0, 2)),
    "over": lambda a, b, _: (a + b).mean(1, keepdim=True),
    "index": lambda a, b, _: (a + b)[:, :2],
}


@pytest.mark.parametrize("reason", MERGES)
def test_operations_that_mix_channels_are_refused_by_name(reason):
    with pytest.raises(WiringError, match=reason) as caught:
        wire(Merging(MERGES[reason]), images(4))
    assert re.search(r"node '\w+'", str(caught.value))
    assert "test_wiring_refused.py:" in str(caught.value) or reason == "several outputs"


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (Attention(), torch.randn(2, 3), "node 'attention' .*MultiheadAttention"),
        (models.squeezenet1_1(weights=None), images(64), "node 'cat' of module 'features.3' .*squeezenet.py:"),
        (models.resnext50_32x4d(weights=None), images(64), "'layer1.0.conv2' .*grouped convolution"),
        (nn.Sequential(nn.Identity(), Dynamic()), images(8), r"module '1' .*wirings.py:\d+.* control flow"),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 2)), images(8), "'0'.*ConvTranspose2d"),
        (nn.Sequential(nn.Conv2d(3, 6, 1, groups=3)), images(8), "'0'.*grouped convolution"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(8, 2)), images(8), "'1'.*linear layer"),
        (nn.Sequential(nn.Conv2d(4, 4, 1)), images(8), "'0'.*does not run"),
        (nn.Sequential(nn.Linear(3, 4)), torch.randn(3), r"example of \[3\]"),
        (
            nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(2, 12), nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1)),
            images(8),
            "'2'.*group",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)), images(8), "'1'.*LocalResponseNorm"),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)), torch.randn(2, 3), "'1'.*softmax"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_cannot_be_wired(network, example, message):
    with pytest.raises(WiringError, match=message):
        wire(network, example)


def test_unused_parameters_are_refused():
    network = nn.Sequential(nn.Linear(3, 2))
    network.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    with pytest.raises(WiringError, match="'spare'"):
        wire(network, torch.randn(2, 3))
