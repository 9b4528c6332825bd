"""Statistics set right: BatchNorm's against the plain mean and variance, layers' against their target."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedloom.fusion.baselines import naive_average
from fedloom.fusion.cla_ot.repair import (
    Statistics,
    Target,
    first_calls,
    in_basis,
    mixture,
    recompute_statistics,
    repair,
    rescale,
    reset,
    running,
    watched,
)
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.probe import Moments, observe
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import apart, images, network, outputs

VGG = "vgg11:width=0.0625,norm=batch"
BARE = "vgg11:width=0.0625,norm=none"


def norms(built: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in built.modules() if isinstance(module, nn.BatchNorm2d)]


def over_channels(values: Tensor) -> Tensor:
    return values.movedim(1, 0).flatten(1)


def layer_moments(network: nn.Module, layers: list[str], probe: Tensor) -> dict[str, Moments]:
    """Moments of the named layers' outputs on the probe set, by name."""
    wiring = wire(network, probe[:1])
    nodes = first_calls(wiring, layers)
    seen = observe(wiring, probe, moments=set(nodes.values()))
    return {name: seen.moments[node] for name, node in nodes.items()}


def measured(built: nn.Module, layers: list[str], probe: Tensor) -> dict[str, Statistics]:
    return {name: (found.mean, found.std) for name, found in layer_moments(built, layers, probe).items()}


def inputs_of_norms(built: nn.Module, probe: Tensor) -> tuple[dict[str, Statistics], dict[str, Statistics]]:
    """Of BatchNorms by name: statistics of what they are given, and their own."""
    wiring = wire(built, probe[:1])
    nodes = watched(wiring)
    moments = observe(wiring, probe, moments=set(nodes.values())).moments
    own = {name: running(built.get_submodule(name)) for name in nodes}
    return {name: (moments[node].mean, moments[node].std) for name, node in nodes.items()}, {
        name: found for name, found in own.items() if found is not None
    }


def hidden_layers(built: nn.Module, probe: Tensor) -> list[str]:
    wiring = wire(built, probe[:1])
    return [layer.name for layer in wiring.layers if layer.kind != "norm" and not wiring.axes[layer.outputs].fixed]


def test_statistics_are_the_mean_over_the_batches():
    built, batches = network(VGG), [images(8, seed=1), images(8, seed=2), images(4, seed=3)]
    convolution, norm = built.get_submodule("extractor.0"), norms(built)[0]
    recompute_statistics(built, batches)
    seen = [over_channels(outputs(convolution, batch)) for batch in batches]
    torch.testing.assert_close(norm.running_mean, torch.stack([x.mean(dim=1) for x in seen]).mean(dim=0))
    torch.testing.assert_close(norm.running_var, torch.stack([x.var(dim=1) for x in seen]).mean(dim=0))
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 3


def test_the_statistics_of_one_batch_are_those_in_training_mode():
    built, batch = network("resnet18:width=0.0625"), images(8)
    expected = copy.deepcopy(built).train()
    for norm in norms(expected):
        norm.momentum = 1.0
    outputs(expected, batch)
    recompute_statistics(built, [batch])
    for ours, theirs in zip(norms(built), norms(expected), strict=True):
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("mode", [True, False])
def test_flags_momentum_and_weights_stay(mode):
    built = network(VGG).train(mode)
    norms(built)[1].train(not mode)
    norms(built)[2].momentum = 0.3
    flags, momenta = [module.training for module in built.modules()], [norm.momentum for norm in norms(built)]
    before = {name: parameter.clone() for name, parameter in built.named_parameters()}
    recompute_statistics(built, [images(4)])
    with pytest.raises(RuntimeError):
        recompute_statistics(built, [images(4, channels=2)])
    assert [module.training for module in built.modules()] == flags
    assert [norm.momentum for norm in norms(built)] == momenta
    assert all(torch.equal(parameter, before[name]) for name, parameter in built.named_parameters())


def test_dropout_sleeps_while_statistics_are_measured():
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    built = layers.double().train()
    found = []
    for _ in range(2):
        recompute_statistics(built, [images(4, 4)])
        found.append(norms(built)[0].running_mean)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("text", [BARE, "mlp:widths=[12,9,7]", "resnet20:norm=none,width=0.5", "lenet:width=0.5"])
def test_moments_of_two_halves_add_up(text):
    built, probe = network(text), images(16)
    layers = hidden_layers(built, probe)
    whole, first, second = (layer_moments(built, layers, part) for part in (probe, probe[:6], probe[6:]))
    assert list(whole) == layers
    for layer in layers:
        both = first[layer] + second[layer]
        assert both.count == whole[layer].count
        torch.testing.assert_close(both.mean, whole[layer].mean)
        torch.testing.assert_close(both.std, whole[layer].std)


@pytest.mark.parametrize("text", [BARE, "mlp:widths=[12,9,7]", "resnet20:norm=none,width=0.5", "lenet:width=0.5"])
def test_rescaled_layers_have_the_target_statistics(text):
    parents, probe = [network(text, seed) for seed in range(2)], images(40)
    built = naive_average(parents)
    layers = hidden_layers(built, probe)
    statistics = [in_basis(measured(parent, layers, probe), {}) for parent in parents]
    target = mixture(statistics, {layer: [0.3, 0.7] for layer in layers})
    before = outputs(built, probe)
    rescale(built, probe, target)
    found = layer_moments(built, layers, probe)
    for layer, (mean, std) in target.items():
        torch.testing.assert_close(found[layer].mean, mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[layer].std, std, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(outputs(built, probe), before)


def test_the_target_is_the_weighted_mean():
    parents, probe = [network(BARE, seed) for seed in (0, 1)], images(8)
    statistics = [in_basis(measured(parent, ["extractor.0"], probe), {}) for parent in parents]
    mean, std = mixture(statistics, {"extractor.0": [0.25, 0.75]})["extractor.0"]
    values = [over_channels(outputs(parent.get_submodule("extractor.0"), probe)) for parent in parents]
    torch.testing.assert_close(mean, 0.25 * values[0].mean(dim=1) + 0.75 * values[1].mean(dim=1))
    expected = 0.25 * values[0].std(dim=1, correction=0) + 0.75 * values[1].std(dim=1, correction=0)
    torch.testing.assert_close(std, expected)


def test_a_constant_channel_gets_the_mean_only():
    built, probe = network("mlp:widths=[6,5]"), images(8)
    with torch.no_grad():
        built.get_parameter("extractor.1.weight")[2] = 0.0
    rescale(built, probe, {"extractor.1": (torch.full((6,), 0.5).double(), torch.full((6,), 2.0).double())})
    found = layer_moments(built, ["extractor.1"], probe)["extractor.1"]
    torch.testing.assert_close(found.mean, torch.full((6,), 0.5).double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.std[[0, 1, 3, 4, 5]], torch.full((5,), 2.0).double(), rtol=1e-4, atol=1e-4)
    assert found.std[2] < 1e-6 and not built.get_parameter("extractor.1.weight")[2].any()


@pytest.mark.parametrize(
    "text", [BARE, "mlp:widths=[6,5],bias=false", "resnet18:width=0.0625,norm=none", "lenet:bias=false"]
)
def test_layers_without_bias_get_one(text):
    parents, probe = [network(text, seed) for seed in (0, 1)], images(8)
    layers = hidden_layers(parents[0], probe)
    fused = fuse(parents, into=0, probe=probe, settings=FusionSettings(refit="none"))
    biases = {name.removesuffix(".bias") for name in fused.network.state_dict() if name.endswith(".bias")}
    assert biases == {*layers, "head"}
    assert fused.notes[0] == f"{len(layers)} layers without bias got one by repair, {layers[0]} the first"
    assert all("compare both before you use it" in note for note in fused.notes[1:]) and len(fused.notes) <= 2
    assert not any(name.startswith("extractor") for name in parents[0].state_dict() if name.endswith("bias"))
    assert dict(fused.network.named_parameters()).keys() > dict(parents[0].named_parameters()).keys()


def test_statistics_move_with_the_channels():
    built, probe = network("mlp:widths=[4,3]"), images(8)
    own = measured(built, ["extractor.1", "extractor.3"], probe)
    matrix = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.5], [0.0, 0.0]])
    moved = in_basis(own, {"extractor.1": matrix})
    mean, std = own["extractor.1"]
    torch.testing.assert_close(moved["extractor.1"][0], torch.stack([mean[0], mean[1:3].mean()]))
    torch.testing.assert_close(moved["extractor.1"][1], torch.stack([std[0], std[1:3].mean()]))
    torch.testing.assert_close(moved["extractor.3"], own["extractor.3"])


def test_a_layer_that_one_parent_lacks_is_the_others():
    one = torch.tensor([1.0]), torch.tensor([2.0])
    assert mixture([{"a": one}, {}], {"a": [0.3, 0.7]}) == {"a": one}
    assert mixture([{"a": one}, {}], {"a": [0.0, 1.0]}) == {}


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_nothing_but_batch_norms_statistics_is_repaired_where_there_are_norms(norm):
    parents, probe = [network(f"vgg11:width=0.125,norm={norm},groups=4", seed) for seed in (0, 1)], images(8)
    built = naive_average(parents)
    before = copy.deepcopy(built)
    seen, own = zip(*(inputs_of_norms(parent, probe) for parent in parents), strict=True)
    halves = {name: [0.5, 0.5] for name in seen[0]}
    assert repair(built, Target(mixture(seen, halves), mixture(own, halves)), probe) == ()
    changed = {n for n, tensor in built.state_dict().items() if not torch.equal(tensor, before.state_dict()[n])}
    assert all("running" in name for name in changed)
    assert bool(changed) is (norm == "batch")


def test_a_batch_norms_statistics_stand_to_what_it_is_given_as_the_targets_do():
    built, probe = network(VGG), images(16)
    now, _ = inputs_of_norms(built, probe)
    first, *_, last = now
    mean, std = torch.full((8,), 0.5).double(), torch.full((8,), 2.0).double()
    reset(built, probe, Target({first: (mean, std)}, {first: (mean + 3.0, 1.5 * std)}))
    own_mean, own_std = inputs_of_norms(built, probe)[1][first]
    torch.testing.assert_close(own_mean, now[first][0] + 3.0 * now[first][1] / 2.0)
    torch.testing.assert_close(own_std, 1.5 * now[first][1])
    before = copy.deepcopy(built)
    found, own = inputs_of_norms(built, probe)
    reset(built, probe, Target(found, {name: (mean + 1, std * 2) for name, (mean, std) in own.items()}))
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in built.state_dict().items()), last


def test_constant_channels_keep_their_statistics():
    built, probe = network(VGG), images(8)
    name = next(iter(inputs_of_norms(built, probe)[0]))
    with torch.no_grad():
        built.get_parameter("extractor.0.weight")[2] = 0.0
    before = copy.deepcopy(built)
    wanted = torch.zeros(8).double(), torch.tensor([1.0, 0.0, *[1.0] * 6]).double()
    reset(built, probe, Target({name: wanted}, {name: wanted}))
    for buffer in ("running_mean", "running_var"):
        new, old = (each.get_buffer(f"{name}.{buffer}") for each in (built, before))
        assert (new == old).tolist() == [False, True, True, *[False] * 5]


def test_as_batch_norm_that_was_trained_on_the_probe_set_repair_measures_it():
    """Parents whose own statistics are the probe's: so are then the fused network's."""
    parents, probe = [network("resnet18:width=0.125", seed) for seed in (0, 1)], images(24)
    for parent in parents:
        recompute_statistics(parent, [probe])
    fused = fuse(parents, into=0, probe=probe, settings=FusionSettings(refit="none")).network
    again = copy.deepcopy(fused)
    recompute_statistics(again, [probe])
    assert apart(fused, again, images(6, seed=1)) < 1e-2


@pytest.mark.parametrize("text", [BARE, VGG])
def test_all_of_a_usual_probe_set_counts(text):
    parents, probe = [network(text, seed) for seed in (0, 1)], images(200, 32)
    settings = [FusionSettings(refit="none", repair_samples=samples) for samples in (256, 0, 40)]
    ours, whole, few = (fuse(parents, into=0, probe=probe, settings=given).network.state_dict() for given in settings)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in ours.items())
    assert not all(torch.equal(tensor, few[name]) for name, tensor in ours.items())
