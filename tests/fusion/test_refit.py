"""Refit: least squares toward given weights, and networks that are fitted anew layer by layer."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.refit.head import fitted_head, mixed
from fedloom.fusion.refit.least_squares import LayerStatistics, change_of_rows
from fedloom.fusion.refit.patches import matrix, patches, picked, weight_of
from fedloom.fusion.refit.sensitivity import sensitivities
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import apart, hidden, images, network, outputs

REFITS = ("plans", "regression", "selection")
LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, 2, 1), (4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), groups=2), (4, 9, 8)),
    "depthwise": (lambda: nn.Conv1d(4, 4, 3, dilation=2, groups=4, padding=2, padding_mode="circular"), (4, 9)),
    "same": (lambda: nn.Conv2d(4, 2, 3, padding="same", dilation=2), (4, 7, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), (4, 5, 6)),
    "transposed in one dimension": (lambda: nn.ConvTranspose1d(4, 4, 4, 3, 1, dilation=2), (4, 7)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 5, 3)),
    "linear": (lambda: nn.Linear(7, 3), (9, 7)),
}


@pytest.mark.parametrize("share", [None, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_matrix_times_its_patches(name, share):
    build, shape = LAYERS[name]
    layer, inputs = build().double(), torch.randn(5, *shape, dtype=torch.float64)
    wanted = layer(inputs)
    dim = wanted.ndim - 1 if isinstance(layer, nn.Linear) else 1
    product = patches(layer, inputs, share) @ matrix(layer, layer.weight).mT
    torch.testing.assert_close(product.transpose(0, 1).flatten(1) + layer.bias, picked(wanted, share, (dim,)))
    assert torch.equal(weight_of(layer, matrix(layer, layer.weight)), layer.weight)


sizes = st.integers(1, 8)


@given(sizes, st.integers(3, 30), sizes, sizes, st.floats(1e-4, 10.0), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_sums_of_sites_give_what_all_rows_give(groups, rows, inputs, outputs_, penalty, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, rows, inputs, generator=generator, dtype=torch.float64) + 1.0
    e = torch.randn(groups, rows, outputs_, generator=generator, dtype=torch.float64)
    sites = [LayerStatistics.of([(x[:, place::3], e[:, place::3])]) for place in range(3)]
    for change in ((sites[0] + sites[1] + sites[2]).change(penalty), change_of_rows(x, e, penalty)):
        for ours, whole in zip(change, LayerStatistics.of([(x, e)]).change(penalty), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-8)
    without = (sites[0] + sites[1] + sites[2] - sites[1]).change(penalty)
    for ours, wanted in zip(without, (sites[0] + sites[2]).change(penalty), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-8)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_the_change_minimises_the_penalised_error(seed):
    generator = torch.Generator().manual_seed(seed)
    x, e = (torch.randn(1, 12, size, generator=generator, dtype=torch.float64) for size in (20, 3))  # fewer rows than inputs
    weight, bias = change_of_rows(x, e, 0.1)

    def lost(w: Tensor, b: Tensor) -> float:
        spread = (x - x.mean(1, keepdim=True)).square().sum(1)
        spread = spread + 1e-3 * spread.mean(1, keepdim=True)
        return float((e - x @ w.mT - b[:, None]).square().sum() + 0.1 * (w.square() * spread[:, None]).sum())

    best = lost(weight, bias)
    for _ in range(5):
        step = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        assert lost(weight + 1e-3 * step, bias) > best
        assert lost(weight, bias + 1e-3 * step[..., 0]) > best


def test_the_head_heeds_whom_is_sure():
    sure, torn = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.1, 0.0]])
    assert mixed([sure, torn], [0.5, 0.5])[0, 0] > 0.85
    torch.testing.assert_close(mixed([sure, sure], [0.3, 0.7]), sure.double().softmax(dim=1))
    torch.testing.assert_close(mixed([sure, torn], [0.0, 1.0]), torn.double().softmax(dim=1))


def test_the_head_comes_nearer_to_the_mixture_and_stays_when_it_is_there():
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(3)
    goal = (x[:, :3] * 2).double().softmax(dim=1)
    found = fitted_head(x, weight, bias, goal)
    assert found is not None

    def lost(w: Tensor, b: Tensor) -> float:
        return float(nn.functional.cross_entropy((x @ w.T + b).double(), goal))

    assert lost(*found) < 0.8 * lost(weight, bias)
    assert fitted_head(x, weight, bias, (x @ weight.T).double().softmax(dim=1)) is None


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("text", ["vgg11:width=0.125,norm=batch", "resnet18:width=0.125,norm=none", "resnet20:norm=group"])
def test_a_permuted_twin_changes_nothing(text, refit):
    one, probe = network(text), images(24)
    fused = fuse([hidden(one, probe), one], into=1, probe=probe, settings=FusionSettings(refit=refit))
    assert apart(fused.network, one, images(6, seed=3)) < 1e-6


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("text", ["mlp:widths=[12,9]", "vgg11:width=0.125,norm=batch", "resnet18:width=0.125,norm=none"])
def test_the_control_is_the_network_itself(text, refit):
    """All weight on `into`: whatever is imitated is that network."""
    networks, probe = [network(text, seed) for seed in (0, 1)], images(40)
    fused = fuse(networks, into=1, probe=probe, weights=[0, 1], settings=FusionSettings(refit=refit))
    assert apart(fused.network, networks[1], probe) < 1e-5


@pytest.mark.parametrize("texts", [("vgg13:width=0.125,norm=batch", "vgg11:width=0.0625,norm=batch"),
                                   ("resnet34:width=0.125,norm=batch", "resnet18:width=0.0625,norm=batch")])  # fmt: skip
@pytest.mark.parametrize("refit", REFITS)
def test_answers_come_nearer_to_the_mixture(texts, refit):
    """On the probe set; widths and depth are those asked for, and the networks stay as they are."""
    networks, probe = [network(text, seed) for seed, text in enumerate(texts)], images(64)
    before = [copy.deepcopy(one.state_dict()) for one in networks]
    goal = mixed([outputs(one, probe) for one in networks], [0.5, 0.5])

    def lost(one: nn.Module) -> float:
        return float(nn.functional.cross_entropy(outputs(one, probe), goal))

    fused = fuse(networks, into=1, depth=0, probe=probe, settings=FusionSettings(refit=refit))
    plain = fuse(networks, into=1, depth=0, probe=probe, settings=FusionSettings(refit="none", repair=False))
    assert lost(fused.network) < lost(plain.network)
    bare = {name: tensor.shape for name, tensor in plain.network.state_dict().items()}
    assert bare.items() <= {name: tensor.shape for name, tensor in fused.network.state_dict().items()}.items()
    for one, state in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
    assert any(note.startswith(f"refit by {refit}") for note in fused.notes)


def test_at_full_width_all_channels_of_both_are_kept():
    """Twice as wide, so that nothing is dropped: with heads as they are it is the mean of both networks' logits."""
    networks, probe = [network("vgg11:width=0.125,norm=batch", seed) for seed in (0, 1)], images(200)
    wide = fuse(networks, into=0, probe=probe, settings=FusionSettings(width=2.0))
    hid = [name for name in wide.plans[0] if name.startswith("extractor")]
    assert all(int(wide.plans[place][name].sum()) == len(wide.plans[place][name]) for place in (0, 1) for name in hid)
    goal = mixed([outputs(one, images(50, seed=5)) for one in networks], [0.5, 0.5])
    found = outputs(wide.network, images(50, seed=5)).softmax(dim=1)
    narrow = fuse(networks, into=0, probe=probe)
    thin = outputs(narrow.network, images(50, seed=5)).softmax(dim=1)
    assert (found - goal).abs().mean() < (thin - goal).abs().mean()
    assert wide.parameters > 1.8 * narrow.parameters


@pytest.mark.parametrize("width", [0.5, 1.25, 1.5])
def test_widths(width):
    networks = [network("vgg11:width=0.125,norm=batch", seed) for seed in (0, 1, 2)]
    fused = fuse(networks, into=0, probe=images(32), settings=FusionSettings(width=width))
    own, made = (one.state_dict() for one in (networks[0], fused.network))
    assert len(made["extractor.0.weight"]) == round(width * len(own["extractor.0.weight"]))
    assert bool(torch.isfinite(outputs(fused.network, images(4))).all())


def test_a_small_probe_set_is_said_with_its_rank():
    networks = [network("vgg11:width=0.125,norm=none", seed) for seed in (0, 1)]
    notes = " ".join(fuse(networks, into=0, probe=images(6)).notes)
    found = re.search(r"small for \d+ layers: of the (\d+) inputs of '\S+' it shows a rank of (\d+) at most", notes)
    assert found is not None and int(found[2]) == 6 * 4 - 1 and int(found[1]) == 64 * 9


@pytest.mark.parametrize(("options", "message"), [
    ({"refit": "all"}, "fusion refit: got 'all', takes one of: none, plans, regression, selection"),
    ({"width": 0.0}, "fusion width: got 0"),
    ({"width": 1.5, "refit": "plans"}, "fusion width: got 1.5 with refit 'plans'"),
    ({"sequential": True}, "fusion refit: got 'selection' with sequential plans"),
])  # fmt: skip
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(UserError, match=message):
        replace(FusionSettings(), **options)


@pytest.mark.parametrize("outputs_", [1, 3])
@pytest.mark.parametrize("refit", REFITS)
def test_networks_that_give_values_are_fitted_to_their_mean(refit, outputs_):
    """Also those of a single output, which is no logit of several classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(
            nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, outputs_)).double()
        )
    options: dict[str, Any] = {} if outputs_ == 1 else {"answers": "values"}
    made = {name: fuse(networks, into=0, probe=x[:300], settings=FusionSettings(refit=name, **options)).network
            for name in ("none", refit)}  # fmt: skip
    mean = torch.stack([outputs(one, x[300:]) for one in networks]).mean(dim=0)
    apart_ = {name: float((outputs(one, x[300:]) - mean).square().mean()) for name, one in made.items()}
    assert apart_[refit] < 0.6 * apart_["none"] and apart_[refit] < 0.2 * float(mean.var())


def test_sensitivities_of_answers_at_each_step_are_those_of_the_steps_as_examples():
    graph, probe = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(4, 2, 3)
    steps, flat = sensitivities(graph, probe, {"_0": (2,)}), sensitivities(graph, probe.view(8, 3), {"_0": (1,)})
    torch.testing.assert_close(steps, flat)
