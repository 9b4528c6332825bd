"""Networks cut in two: at every point the halves are the whole, heads of another network fit where shapes do."""

import pytest
import torch

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, Network, initialise
from fedloom.clients.networks.split import split_points
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

OWN = "torchvision.models:mobilenet_v2"


def built(section: dict, size: int = 16, classes: int = 5) -> Network:
    network = NETWORKS.build(section, "network").empty(Form.images(3, size, classes))
    initialise(network, torch.Generator().manual_seed(0))
    return network.eval()


def outputs(network: Network, size: int = 16) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("of", [{"name": "resnet20", "width": 0.5}, {"name": "conv6"}, {"name": "mlp", "widths": [9, 7]},
                                {"name": "wide_resnet", "depth": 10, "widen": 1}, {"name": "convnet"}])  # fmt: skip
def test_the_halves_are_the_whole_network_wherever_it_is_cut(of):
    whole = built(of)
    points = split_points(whole, torch.zeros(1, 3, 16, 16))
    assert len(points) >= 3
    for at, shape in points.items():
        cut = built({"name": "split", "of": of, "at": at})
        with torch.inference_mode():
            assert tuple(cut.extractor(torch.zeros(2, 3, 16, 16)).shape) == (2, *shape)
        assert torch.equal(outputs(cut), outputs(whole)), at


def test_a_torchvision_network_is_cut_and_starts_as_the_whole_one_does():
    whole, cut = built({"name": OWN}, 32), built({"name": "split", "of": {"name": OWN}, "at": "features.11"}, 32)
    assert torch.equal(outputs(cut, 32), outputs(whole, 32))
    assert any(name.startswith("extractor.body.features.11.") for name in cut.state_dict())
    assert not any("features.11." in name for name in cut.head.state_dict())


def test_a_head_of_another_network_reads_features_that_are_made_to_fit():
    rest = {"name": "rest", "of": {"name": OWN}, "at": "features.10", "size": 16}
    network = built({"name": "split", "of": {"name": "resnet20"}, "at": "stage2", "channels": 64, "side": 2, "head": rest})
    assert outputs(network).shape == (3, 5)
    assert network.extractor(torch.zeros(1, 3, 16, 16)).shape == (1, 64, 2, 2)


def test_features_of_unit_length():
    network = built({"name": "split", "of": {"name": "convnet"}, "at": "block2", "unit": True})
    norms = network.extractor(torch.randn(4, 3, 16, 16)).flatten(1).norm(dim=1)
    assert torch.allclose(norms, torch.ones(4), atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "layer", "instance", "group"])
def test_every_norm_trains(norm):
    network = built({"name": "convnet", "widths": [8, 16], "norm": norm}).train()
    network(torch.randn(4, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


RESNET = {"name": "resnet20"}
REST = {"name": "rest", "of": RESNET, "at": "stage2"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"of": RESNET, "at": "stage4"}, r"unknown network\.at 'stage4'; did you mean .*stage1, .*stage3"),
        (
            {"of": RESNET, "at": "stage2", "channels": 5},
            r"features are 5 x 8 x 8, .*takes 32 x 8 x 8",
        ),
        (
            {"of": RESNET, "at": "stage1", "head": REST},
            r"takes features of 32 x 16 x 16, but they are 16 x 16 x 16",
        ),
        (
            {"of": RESNET, "at": "flat", "channels": 5},
            r"features at 'flat' are 64; remove network\.channels and network\.side",
        ),
        (
            {"of": RESNET, "at": "flat", "head": {"name": "convnet"}},
            r"takes features of channels x side x side",
        ),
        (
            {"of": {"name": "convnet", "strides": [2]}},
            r"network\.strides: got 1 strides, takes one for each of the 3 widths",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_both_shapes(section, message):
    with pytest.raises(UserError, match=message):
        built({"name": "split", **section})


def test_cutting_leaves_no_trace_in_the_state_of_a_network() -> None:
    whole = built({"name": "resnet20", "width": 0.5})
    before: State = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    split_points(whole.train(), torch.zeros(1, 3, 16, 16))
    assert whole.training and all(torch.equal(tensor, before[name]) for name, tensor in whole.state_dict().items())
