"""What cannot be wired is refused by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from fedloom.fusion.graph.channels import WiringError, wire
from tests.fusion.wirings import Dynamic, Merging, check, images

MERGES = {
    "several outputs": lambda a, b, _: (a, b),
    "batch": lambda a, b, _: (a + b).flatten(),
    "cumsum": lambda a, b, _: (a + b).cumsum(1),
    "sort": lambda a, b, _: (a + b).sort(1)[0],
    "lrn": lambda a, b, _: F.local_response_norm(a, 2) + b,
    "depends on data": lambda a, b, _: a.index_select(1, b.mean((0, 2, 3)).argmax(0, keepdim=True)),
}
NAMED = {"lrn": "local_response_norm", "depends on data": "argmax"}  # what their messages say


@pytest.mark.parametrize("reason", MERGES)
def test_operations_that_mix_channels_are_refused_by_name(reason):
    with pytest.raises(WiringError, match=NAMED.get(reason, reason)) as caught:
        wire(Merging(MERGES[reason]), images(4))
    assert re.search(r"node '\w+'", str(caught.value))
    assert "test_wiring_refused.py:" in str(caught.value) or reason == "several outputs"
    assert re.search(r"; (use|return) ", str(caught.value))


MERGES_IN_REACH = {
    "cat": lambda a, b, _: torch.cat([a, b], 1),
    "mul": lambda a, b, _: a * b,
    "einsum": lambda a, b, _: torch.einsum("nchw,ndhw->ncd", a, b),
    "matmul": lambda a, b, _: a @ b,
    "splits": lambda a, b, _: (a + b).view(a.size(0), 2, -1),
    "unbind": lambda a, b, _: (a + b).unbind(1)[0],
    "pad": lambda a, b, _: F.pad(a + b, (0, 0, 0, 0, 0, 2)),
    "mean": lambda a, b, _: (a + b).mean(1, keepdim=True),
    "index": lambda a, b, _: (a + b)[:, :2],
}


@pytest.mark.parametrize("name", MERGES_IN_REACH)
def test_operations_that_the_first_version_refused(name):
    """Straight to the output, so that what remains of the channels is fixed."""
    check(Merging(MERGES_IN_REACH[name]), images(4), singly=None)


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (nn.Sequential(nn.Identity(), Dynamic()), images(8), r"module '1' .*wirings.py:\d+.* control flow"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 2, groups=2)), images(8), "'1'.*transposed .*groups"),
        (nn.Sequential(nn.Conv2d(4, 4, 1)), images(8), "'0'.*does not run"),
        (nn.Sequential(nn.Conv2d(4, 4, 1)), images(8), r"of the shape \[k, 3, 8, 8\]: it takes 4 channels"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), images(8), r"of the shape \[k, 3, 8, 8\]: it takes 64 features"),
        (nn.Sequential(nn.Linear(3, 4)), torch.randn(3), r"example of \[3\]"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)), images(8), "'1'.*LocalResponseNorm"),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)), torch.randn(2, 3), "'1'.*softmax"),
        (nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 4)), torch.randn(2, 3), "recurrent networks such as lstm cannot be fused"),
        (models.GoogLeNet(num_classes=5, init_weights=False), images(64), "'aux1.*for training only"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_cannot_be_wired(network, example, message):
    with pytest.raises(WiringError, match=message) as caught:
        wire(network, example)
    assert "\n" not in str(caught.value)


def test_unused_parameters_are_refused():
    network = nn.Sequential(nn.Linear(3, 2))
    network.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    with pytest.raises(WiringError, match="'spare'"):
        wire(network, torch.randn(2, 3))
