"""A network that is fused with itself is returned: parameters, buffers and outputs, BatchNorm's statistics included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from fedloom.fusion.agreement import few_samples
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import apart, images, network, randomised

REFITS = ("none", "plans", "regression", "selection")
FAMILIES = [
    *("mlp:widths=[12,9,7],bias=false", "lenet:width=0.5", "conv6:norm=batch,width=0.5"),
    *("vgg13:width=0.125,norm=batch", "vgg11:width=0.125,norm=none", "vgg11:width=0.125,norm=batch,affine=false"),
    *("vgg11:width=0.25,norm=group,groups=4", "resnet18:width=0.125", "resnet34:width=0.0625,norm=none"),
    *("resnet20:norm=batch,bias=true", "wide_resnet:depth=10,widen=1"),
]


def is_returned(built: nn.Module, probe: torch.Tensor, settings: FusionSettings | None = None) -> None:
    """Fused with itself it has the same tensors and outputs, to 1e-5."""
    fused = fuse([built, built], into=0, probe=probe, settings=settings)
    ours, wanted = fused.network.state_dict(), built.state_dict()
    assert list(ours) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5 * float(tensor.abs().max()), msg=name)
    assert apart(fused.network, built, images(6, seed=1).to(probe)) < 1e-5
    assert fused.notes == tuple(few_samples(probe))


kinds = st.sampled_from([torch.float32, torch.float64])


@given(st.sampled_from(FAMILIES), st.integers(0, 2**31), st.integers(2, 24), kinds, st.sampled_from(REFITS))
@settings(max_examples=15, deadline=None)
def test_with_random_weights_and_statistics(text, seed, samples, dtype, refit):
    is_returned(network(text, seed).to(dtype), images(samples).to(dtype), FusionSettings(refit=refit))


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "mobilenet_v2"])
def test_torchvisions_networks(name):
    built = models.get_model(name, weights=None, num_classes=10)
    if name.startswith("vgg"):
        built.classifier = nn.Linear(25088, 10)  # for three layers of 100 million weights
    is_returned(randomised(built, 3).float(), images(8).float())


@pytest.mark.parametrize("text", ["vgg13:width=0.125,norm=batch", "resnet20:norm=batch", "conv6:norm=batch", "lenet"])
@pytest.mark.parametrize("options", [{"repair_samples": 0}, {"repair_samples": 5}, {"refit": "selection"}])
def test_trained_for_a_few_steps(text, options):
    """Then running statistics are no set's: they are still on their way."""
    built = network(text).float().train()
    for name, tensor in built.named_buffers():
        tensor.fill_(1.0 if name.endswith("var") else 0)
    steps = torch.optim.SGD(built.parameters(), lr=0.01, momentum=0.5)
    for seed in range(4):
        steps.zero_grad()
        nn.functional.cross_entropy(built(images(16, seed=seed).float()), torch.arange(16) % 10).backward()
        steps.step()
    is_returned(built.eval(), images(40, seed=9).float() + 0.3, FusionSettings(**{"refit": "none", **options}))


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("text", ["mlp:widths=[8,6]", "vgg11:width=0.125,norm=batch"])
def test_channels_that_nothing_tells_apart_stay(text, refit):
    built = network(text)
    weight = next(tensor for tensor in built.parameters() if tensor.ndim > 1)
    with torch.no_grad():
        weight[1:4] = 0.0
        weight[5] = weight[6]
    is_returned(built, images(20), FusionSettings(refit=refit))
