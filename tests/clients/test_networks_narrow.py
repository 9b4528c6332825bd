"""Narrow networks: the widths that an option gives, and shortcuts that oneDNN would corrupt the heap with."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torchvision.models._utils import _make_divisible

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, parse_name
from fedloom.clients.networks.layers import scaled

SHORTCUT = """
import torch
from fedloom.clients.networks.residual import ResnetSpec

torch.set_num_threads(1)
for inputs, size in 4 * [(6, 16), (8, 64), (12, 128)]:
    layer = ResnetSpec().convolution(inputs, 16, stride=2, kernel=1)
    images = torch.randn(64, size, size, inputs).permute(0, 3, 1, 2)  # channels last
    layer(images).square().sum().backward()
    exact = torch.nn.functional.conv2d(images[:, :, ::2, ::2].double(), layer.weight.double())
    (wanted,) = torch.autograd.grad(exact.square().sum(), [layer.weight])
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
"""


@given(st.integers(1, 1024), st.floats(0.01, 16).filter(lambda width: width != 1))
@example(64, 0.1)
def test_widths_follow_mobilenets_rule(step, width):
    assert scaled(step, width) == _make_divisible(step * width, 8)
    assert scaled(step, 1.0) == step


@pytest.mark.parametrize(
    "name", sorted(set(NETWORKS.names()) - {"mlp", "exits", "convnet", "split", "rest", "cnn1d", "lstm", "transformer"})
)  # whose widths have no factor
def test_narrow_networks_have_whole_vectors_of_channels_and_groups_that_divide(name):
    for width in (0.05, 0.1, 0.5, 1.5):
        groups = {} if name == "lenet" else {"groups": 8, "norm": "group"}
        options = ",".join(f"{key}={item}" for key, item in {"width": width, **groups}.items())
        built = parse_name(f"{name}:{options}", Form.images(1, 32, 10)).build()
        layers = [module for module in built.modules() if isinstance(module, nn.Conv2d)]
        assert layers and all(layer.out_channels % 8 == 0 for layer in layers)


@pytest.mark.parametrize("largest", ["DEFAULT", "AVX2"])
def test_shortcuts_of_few_channels_survive_training(largest):
    """Without care oneDNN 3.12 writes behind its workspace: 6 channels kill AVX2, 8 and 12 AVX-512 (its issue 6035)."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": largest, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHORTCUT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
