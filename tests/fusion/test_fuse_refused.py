"""What cannot be fused is refused in one line that names the network, and the layer, tensor or number at fault."""

from typing import Any

import pytest
import torch
from torch import nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import WiringError
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import images, network, randomised

PROBE = images(4)
MLP = "mlp:widths=[6,5]"
RESNET = "resnet18:width=0.0625"
VGG = "vgg11:width=0.125,"


def refusal(networks: list[nn.Module], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        fuse(networks, **{"into": 0, "probe": PROBE, **options})
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("one", "other"), [(MLP, VGG + "norm=none"), (RESNET, VGG + "norm=none"), (VGG + "norm=none", "conv6:norm=none")]
)
def test_different_families(one, other):
    assert "the networks are of different families; groups of layers: " in refusal([network(one), network(other)])


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ("norm=none", "norm=batch", "'extractor.0' (1 layers) and 'extractor.0' (2) have different designs"),
        ("groups=4", "norm=batch", "layer 'extractor.1' (BatchNorm2d: "),
        ("groups=4", "groups=2", "layer 'extractor.1' (GroupNorm: "),
        ("norm=none", "norm=none,bias=true", "layer 'extractor.0' (Conv2d: weight, bias) does not fit"),
        ("groups=4", "groups=4,standardise=true", "layer 'extractor.0' (StandardisedConv2d: "),
    ],
)
def test_different_designs(one, other, line):
    assert line in refusal([network(VGG + one), network(VGG + other)])


@pytest.mark.parametrize("text", [RESNET, VGG + "norm=batch", "lenet"])
def test_other_input_channels(text):
    said = refusal([network(text), network(text, channels=1)])
    assert said.startswith("network 1: ") and "to have 1 channels, but got 3 channels instead" in said


def test_other_image_sizes():
    assert refusal([network(MLP), network(MLP, size=16)]).startswith("network 1: node 'extractor_1' of module 'extractor.1'")


@pytest.mark.parametrize("text", [MLP, RESNET])
def test_other_classes(text):
    assert refusal([network(text), network(text, classes=7)]).startswith("network 1 has 7 classes, the others 10; ")


@pytest.mark.parametrize("tensor", ["extractor.stem.0.weight", "extractor.stem.1.running_var", "head.bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(tensor, value):
    broken = network(RESNET, 1)
    broken.state_dict()[tensor][0] = value
    said = refusal([network(RESNET), broken])
    assert said == f"network 1: tensor '{tensor}' holds values that are not finite"


def test_weights_so_large_that_the_outputs_are_not_finite():
    large = network(MLP)
    with torch.no_grad():
        large.get_parameter("extractor.1.weight").fill_(1e200)
        large.get_parameter("extractor.3.weight").fill_(1e200)
    said = refusal([network(MLP, 1), large], probe=PROBE.abs())
    assert said.startswith("layer 'extractor.3': its outputs are not finite")


def test_arguments_of_other_types():
    pair = [network(MLP), network(MLP, 1)]
    assert refusal(pair, weights="ab") == "fuse: weights 'ab'; use one number for each network"
    assert refusal(pair, settings={"refit": "none"}) == "fuse: settings {'refit': 'none'}; use FusionSettings(...)"


@pytest.mark.parametrize("weights", [[], [1.0], [1, 2, 3], [-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1]])
def test_weights_of_the_average(weights):
    said = refusal([network(MLP), network(MLP, 1)], weights=weights)
    assert said.startswith("fuse: weights [") and said.endswith("use one for each, not negative, not all 0")


@pytest.mark.parametrize(("places", "shown"), [({"into": 2}, "into=2"), ({"into": -1}, "into=-1"),
                                               ({"into": "b"}, "into='b'"), ({"into": True}, "into=True"),
                                               ({"into": 0, "depth": 2}, "depth=2"),
                                               ({"into": 0, "depth": -1}, "depth=-1")])  # fmt: skip
def test_places_out_of_range(places, shown):
    said = refusal([network(MLP), network(MLP, 1)], **places)
    assert said == f"fuse: {shown}; takes the index of one of the 2 networks: 0 to 1"


def test_a_single_network():
    assert refusal([network(MLP)]) == "fuse: got 1 network; use two or more"


def test_networks_without_hidden_layers():
    assert refusal([network("mlp:widths=[]")] * 2) == "network 0 has no hidden layers: nothing to fuse"


def test_the_same_device_and_dtype():
    assert refusal([network(MLP), network(MLP).float()]).startswith("network 1: the probe set is torch.float64")


@pytest.mark.parametrize(("one", "other"), [("vgg13", "vgg11"), ("vgg16", "vgg11")])
def test_convolutions_are_not_merged(one, other):
    networks = [network(f"{text}:width=0.125,norm=batch") for text in (one, other)]
    assert "cannot be merged into the next one" in refusal(networks, into=0, depth=1)


def test_a_map_across_resolutions():
    networks = [network(f"{text}:width=0.125,norm=batch") for text in ("vgg11", "vgg13")]
    said = refusal(networks, into=1, settings=FusionSettings(map=tuple(range(8))))
    assert said.startswith("layer 'extractor.3': ") and said.endswith("the networks work at different resolutions")


class Spare(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 2))
        self.spare = nn.Parameter(torch.zeros(6))


def test_tensors_on_no_axis():
    said = refusal([randomised(Spare()), randomised(Spare(), 1)], probe=torch.randn(5, 4).double())
    assert said.startswith("network 0: parameter 'spare' [6] lies on no axis: unused, or not channel by channel; every ")


def test_what_cannot_be_wired():
    class Transposed(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.transpose(0, 1))

    odd = Transposed(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    with pytest.raises(WiringError, match=r"^network 0: "):
        fuse([odd, odd], into=0, probe=torch.randn(4, 4).double())


def test_what_the_public_code_cannot():
    reference = FusionSettings.reference()
    mobile = network("torchvision:mobilenet_v2")
    assert "do not support depthwise convolutions" in refusal([mobile, mobile], probe=PROBE[:2], settings=reference)
    by_weights = FusionSettings(sequential=True, refit="none", basis="weights")
    assert "sequential plans are made from activations" in refusal([network(MLP)] * 2, settings=by_weights)


def test_biases_that_the_public_codes_plans_would_leave_out_of_scale():
    reference, wide = FusionSettings.reference(), "mlp:widths=[8,5],bias=false"
    message = refusal([network("mlp:widths=[6,5],bias=false"), network(wide)], settings=reference)
    assert "'head' has a bias, and the widths differ at 'extractor.1'" in message and "head_bias=false" in message
    bare = [network(f"mlp:widths=[{width},5],bias=false,head_bias=false") for width in (6, 8)]
    assert fuse(bare, into=0, probe=PROBE, settings=reference).network is not None
    normed = [network(f"vgg11:width={width},norm=batch,bias=true,head_bias=false") for width in (0.125, 0.25)]
    assert fuse(normed, into=0, probe=images(4, size=32), settings=reference).network is not None
    assert fuse([network(MLP), network(MLP)], into=0, probe=PROBE, settings=reference).network is not None
