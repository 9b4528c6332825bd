"""Published ways to merge networks: what they promise on a permuted twin, make of unlike networks, and refuse."""

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.refit.patches import patches, picked
from fedloom.sims.experiments.comparators import COMPARATORS, retrofitting
from fedloom.sims.experiments.comparators import layers as parts
from fedloom.sims.experiments.comparators.channels import _cca, _zipped, assigned
from fedloom.sims.experiments.comparators.depths import segment_starts
from fedloom.sims.experiments.comparators.layers import products, ridge, with_ones
from fedloom.sims.experiments.comparators.sequential import _kmeans, clusters
from tests.fusion.parts import apart, hidden, images, network, outputs, randomised

PROBE = images(24)
TEST = images(6, seed=3)
NIGHTLY = pytest.mark.nightly
NETWORKS = ("vgg11:width=0.125,norm=none", pytest.param("resnet18:width=0.125,norm=batch", marks=NIGHTLY))


def settled(text: str, seed: int = 0) -> nn.Module:
    """A network whose running statistics are those of the probe set."""
    built = network(text, seed)
    recompute_statistics(built, [PROBE])
    return built


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrofitting, "STEPS", 30)


@pytest.mark.parametrize("method", COMPARATORS)
@pytest.mark.parametrize("text", NETWORKS)
def test_a_permuted_twin_gives_the_function_back(method, text, monkeypatch):
    monkeypatch.setattr(parts, "RIDGE", 1e-9)
    built = settled(text)
    before = copy.deepcopy(built.state_dict())
    fused = COMPARATORS[method]([hidden(built, PROBE), built], 1, 1, PROBE)
    interpolates = method in (
        "HF-linear",
        "KF-linear",
        "Retrofitting",
    )  # the last layers have more weights than there are rows
    distance = apart(fused, built, PROBE if interpolates else TEST)
    assert distance < 1e-2  # a BatchNorm that is measured again has the unbiased variance
    torch.testing.assert_close(built.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("method", COMPARATORS)
@pytest.mark.parametrize("norm", [pytest.param("none", marks=NIGHTLY), "batch"])
@pytest.mark.parametrize(("deep", "shallow"), [("vgg13", "vgg11"), pytest.param("resnet34", "resnet18", marks=NIGHTLY)])
def test_networks_of_unequal_depth_and_start_become_one(method, deep, shallow, norm):
    parents = [settled(f"{name}:width=0.0625,norm={norm}", seed) for seed, name in enumerate((deep, shallow, deep))]
    fused = COMPARATORS[method](parents, 1, 0, PROBE)
    widths = {name: tensor.shape for name, tensor in parents[1].state_dict().items()}
    state = fused.state_dict()
    assert len(list(fused.modules())) == len(list(parents[0].modules()))
    assert state["head.weight"].shape == widths["head.weight"]
    given = outputs(fused, TEST)
    assert given.shape == (6, 10) and bool(torch.isfinite(given).all())
    assert min(float((given - outputs(parent, TEST)).abs().max()) for parent in parents) > 1e-3


@pytest.mark.parametrize("method", [method for method in COMPARATORS if method not in ("HF-linear", "CCA Merge")])
@pytest.mark.parametrize("into", [0, 1])
def test_unequal_widths_become_those_of_one(method, into):
    parents = [settled(f"vgg11:width={width},norm=batch", seed) for seed, width in enumerate((0.125, 0.0625))]
    fused = COMPARATORS[method](parents, into, into, PROBE)
    shapes = [{name: list(tensor.shape) for name, tensor in each.state_dict().items()} for each in (fused, parents[into])]
    assert shapes[0] == shapes[1]
    assert bool(torch.isfinite(outputs(fused, TEST)).all())


@pytest.mark.parametrize("method", ["HF-linear", "CCA Merge"])
def test_unequal_widths_are_refused_where_the_method_has_none(method):
    parents = [settled(f"vgg11:width={width},norm=batch") for width in (0.125, 0.0625)]
    with pytest.raises(UserError, match=rf"^{method}: .*'extractor.4.weight' has \[16, 8\] channels .* use equal widths$"):
        COMPARATORS[method](parents, 1, 1, PROBE)


@pytest.mark.parametrize("method", ["Git Re-Basin", "ZipIt", "CCA Merge", "HF-linear", "KF-linear"])
def test_norms_that_a_method_cannot_take_are_refused(method):
    parents = [network("vgg11:width=0.125,norm=group,groups=4", seed) for seed in range(2)]
    with pytest.raises(UserError, match=r"'extractor\.[0-9.a-z]+'[ :].*(GroupNorm|only supports BatchNorm)"):
        COMPARATORS[method](parents, 1, 1, PROBE)


@pytest.mark.parametrize("method", COMPARATORS)
def test_layers_that_read_single_channels_are_refused(method):
    parents = [randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Flatten(),
                                        nn.Linear(6 * 4 * 4, 5)), seed) for seed in range(2)]  # fmt: skip
    with pytest.raises(
        UserError, match=r"^layer '2' is depthwise: comparators support plain convolutions and linear layers$"
    ):
        COMPARATORS[method](parents, 1, 1, images(8, size=8))


def test_regmean_weighs_each_network_by_what_its_layers_take_in(monkeypatch):
    """Where one network's inputs are a hundred times the other's, the layer that reads them is that network's own."""
    loud, quiet = (network("mlp:widths=[12],bias=false", seed, channels=1, size=8) for seed in range(2))
    digits = images(64, size=8, channels=1)
    with torch.no_grad():
        loud.get_submodule("extractor").get_parameter("1.weight").mul_(100.0)
    fused = COMPARATORS["RegMean, aligned"]([quiet, loud], 1, 1, digits)
    head, own = (built.state_dict()["head.weight"] for built in (fused, loud))
    assert float((head - own).norm() / own.norm()) < 0.02


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(3, 5, 1, stride=2), nn.Conv2d(3, 5, 3, dilation=2)]
)
@pytest.mark.parametrize("share", [7, 10_000])
def test_patches_times_weights_are_the_outputs_at_the_picked_positions(layer, share):
    layer, given = layer.double(), images(50, size=9)
    x = with_ones(patches(layer, given, share or None)[0])
    weights = torch.cat([layer.weight.flatten(1).T, layer.bias[None]])
    torch.testing.assert_close(x @ weights, picked(layer(given), share or None))


def test_least_squares_keeps_to_the_start_where_nothing_is_known():
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 0.0
    goal = torch.arange(12, dtype=torch.float64).view(6, 2)
    start = torch.ones(6, 2, dtype=torch.float64)
    found = ridge(products(x, x), products(x, x @ goal), start)
    torch.testing.assert_close(found[5], start[5])
    assert float((found[:5] - goal[:5]).abs().max()) < 0.1 * float((start[:5] - goal[:5]).abs().max())


def test_an_assignment_uses_each_row_once_before_any_again():
    narrow = assigned(np.array([[9.0, 8.0, 1.0], [1.0, 2.0, 0.0]]))
    assert narrow.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    wide = assigned(np.array([[1.0, 2.0], [5.0, 4.0], [4.0, 0.0]]))
    assert wide.tolist() == [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]


def test_zipit_merges_the_most_alike_first():
    near = np.eye(4)
    near[0, 3] = near[3, 0] = 0.9
    near[1, 2] = near[2, 1] = 0.8
    near[0, 1] = near[1, 0] = 0.85
    assert _zipped(near, 2).tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert _zipped(near, 3).sum(dim=0).tolist() == [2.0, 1.0, 1.0]


def test_cca_finds_a_rotation_of_the_channels():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 400, dtype=torch.float64, generator=generator) * torch.arange(1, 6)[:, None]
    rotation, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=generator))
    torch.testing.assert_close(_cca(rotation @ values, values), rotation)


def test_kmeans_groups_neurons_that_do_the_same():
    generator = torch.Generator().manual_seed(2)
    own = torch.randn(30, 3, generator=generator)
    other = own[:, [2, 0, 1, 0]] + 0.01 * torch.randn(30, 4, generator=generator)
    one, two = _kmeans(own, [own, other])
    torch.testing.assert_close(one, torch.diag(torch.tensor([1 / 3, 1 / 2, 1 / 2])))
    assert (two > 0).tolist() == [[False, False, True], [True, False, False], [False, True, False], [True, False, False]]


@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 1000))
def test_segments_have_the_largest_sum_of_similarities(columns: int, more: int, seed: int):
    similar = np.random.default_rng(seed).random((columns + more, columns))

    def total(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], len(similar))
        return sum(similar[first:end, column].sum() for column, (first, end) in enumerate(zip(starts, ends, strict=True)))

    starts = tuple(segment_starts(similar))
    every = [(0, *rest) for rest in combinations(range(1, len(similar)), columns - 1)]
    assert starts in every and total(starts) == pytest.approx(max(map(total, every)))


def test_clusters_are_means_weighted_by_importance():
    outputs = [torch.tensor([[0.0, 10.0], [0.0, 10.0]]), torch.tensor([[0.3, 9.0], [0.3, 9.0]])]
    one, other = clusters(outputs, [torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.0])])
    torch.testing.assert_close(one, torch.tensor([[0.25, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(other, torch.tensor([[0.75, 0.0], [0.0, 0.0]]))


def test_retrofitting_weighs_neurons_by_what_the_answer_owes_to_them():
    """A neuron that no later layer reads has no importance; the networks are as before."""
    built = network("mlp:widths=[6]", 0, channels=1, size=8)
    with torch.no_grad():
        built.get_parameter("head.weight")[:, 2] = 0.0
    before = copy.deepcopy(built.state_dict())
    digits = images(40, size=8, channels=1)
    wiring = retrofitting.wire(built, digits[:1])
    levels = retrofitting._levels(wiring, retrofitting.norms(wiring, built))
    _, importance = retrofitting._observed(built, wiring, levels, digits)
    hidden_level = importance[levels[0].end]
    assert hidden_level[2] == 0.0 and (hidden_level[[0, 1, 3, 4, 5]] > 0).all()
    assert all(weight.grad is None for weight in built.parameters())
    torch.testing.assert_close(built.state_dict(), before, rtol=0, atol=0)
