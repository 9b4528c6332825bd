"""Networks: what is registered builds, standardised weights have no scale, initial ones depend on a generator alone."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.clients.networks import NETWORKS, Network, architecture_of, initialise, parameter_count
from fedloom.clients.networks.architecture import check_own_options
from fedloom.clients.networks.plain import StandardisedConv2d
from fedloom.conf import UserError, load
from fedloom.fusion.state import State
from fedloom.server.run.checks import check


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def network(*overrides: str, seed: int = 0) -> Network:
    """A conv6 for 8x8 grey digits, initialised by the seed."""
    built = architecture_of(load("digits", ["data.size=8", *overrides])).build()
    initialise(built, torch.Generator().manual_seed(seed))
    return built.eval()


def images(seed: int = 0, n: int = 16, size: int = 8) -> Tensor:
    return torch.randn(n, 1, size, size, generator=torch.Generator().manual_seed(seed))


OF_OTHER_INPUTS = ("rest", "cnn1d", "lstm", "transformer")


def logits(built: Network, state: State) -> Tensor:
    built.load_state_dict(state)
    with torch.inference_mode():
        return built(images())


@pytest.mark.parametrize("name", [name for name in NETWORKS.names() if name not in OF_OTHER_INPUTS])
@pytest.mark.parametrize("grey", ["true", "false"])
def test_every_registered_network_is_an_extractor_and_a_head_and_gives_one_logit_per_class(name, grey):
    config = dataclasses.replace(
        load("digits", ["data.size=32", "data.classes=7", f"data.grey={grey}"]), network={"name": name}
    )
    built = architecture_of(config).build()
    initialise(built, torch.Generator().manual_seed(0))
    built.eval()
    with torch.inference_mode():
        given = built(torch.zeros(2, 1 if grey == "true" else 3, 32, 32))
    assert given.shape == (2, 7)
    assert torch.isfinite(given).all()
    assert {key.split(".")[0] for key in built.state_dict()} == {"extractor", "head"}


@pytest.mark.parametrize("name", NETWORKS.names())
def test_options_of_a_network_can_be_pickled(name: str):
    spec = NETWORKS.get(name)
    assert pickle.loads(pickle.dumps(spec)) is spec


@pytest.mark.parametrize(("name", "low", "high"), [("conv6", 71_500, 73_500), ("vgg16", 14.65e6, 14.75e6)])
def test_networks_have_as_many_parameters_as_they_say(name, low, high):
    config = load("digits", [f"network={{name: {name}}}", "data.size=32", "data.grey=false"])
    assert low < parameter_count(architecture_of(config).build()) < high


def effective(layer: StandardisedConv2d) -> Tensor:
    """The weights that the layer convolves with, measured from outside: its response to unit impulses."""
    out, channels, height, width = layer.weight.shape
    impulses = torch.eye(channels * height * width, dtype=layer.weight.dtype).view(-1, channels, height, width)
    with torch.inference_mode():
        return layer(impulses).view(-1, out).T.reshape(layer.weight.shape)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.floats(1e-3, 1e3), st.floats(-10, 10))
@settings(max_examples=40, deadline=None)
def test_standardised_weights_have_mean_0_and_variance_1_over_fan_in(seed, channels, out, scale, shift):
    layer = StandardisedConv2d(channels, out, 3, bias=False, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw, dtype=torch.float64) * scale + shift)
    variance, mean = torch.var_mean(effective(layer), dim=(1, 2, 3), correction=0)
    assert torch.allclose(mean, torch.zeros(out, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(variance, torch.full((out,), 1 / (9 * channels), dtype=torch.float64), rtol=1e-4)


@given(st.integers(0, 2**32), st.lists(st.floats(0.01, 100), min_size=6, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_positive_factor_on_convolutions_does_not_change_a_standardised_network(seed, factors):
    built = network("network.standardise=true", "network.affine=false", seed=seed % 1000)
    before = logits(built, built.state_dict())
    scaled = iter(factors)
    state = {
        name: tensor * next(scaled) if tensor.ndim == 4 else tensor.clone() for name, tensor in built.state_dict().items()
    }
    assert torch.allclose(logits(built, state), before, atol=1e-4)


def sum_and_mean(n: int, *overrides: str, chosen: str) -> tuple[Network, State, State]:
    """The sum and the mean of n random networks; `chosen` tensors are summed or averaged, the rest is the first one's."""
    built = network(*overrides)
    states = [
        {key: tensor.clone() for key, tensor in network(*overrides, seed=seed).state_dict().items()} for seed in range(n)
    ]
    for number, state in enumerate(states):  # as if trained: other scales and shifts in each
        draw = torch.Generator().manual_seed(100 + number)
        for key, tensor in state.items():
            if key.startswith("extractor.") and tensor.ndim == 1:
                tensor += 0.1 * torch.randn(tensor.shape, generator=draw)
    whole = dict(states[0])
    mean = dict(states[0])
    for key, tensor in states[0].items():
        if key.startswith("extractor.") and (chosen == "all" or tensor.ndim == 4):
            whole[key] = torch.stack([state[key] for state in states]).sum(0)
            mean[key] = whole[key] / n
    return built, whole, mean


@pytest.mark.parametrize("n", [2, 7])
def test_sum_and_mean_are_one_function_if_standardised_and_not_affine(n):
    built, whole, mean = sum_and_mean(n, "network.standardise=true", "network.affine=false", chosen="all")
    assert any(not torch.equal(whole[name], mean[name]) for name in whole)
    assert torch.allclose(logits(built, whole), logits(built, mean), atol=1e-4)


def test_sum_and_mean_of_plain_networks_are_one_function_for_convolutions_alone():
    plain = ("network.standardise=false", "network.affine=true")
    built, whole, mean = sum_and_mean(5, *plain, chosen="convolutions")
    assert torch.allclose(logits(built, whole), logits(built, mean), atol=1e-3)
    built, whole, mean = sum_and_mean(5, *plain, chosen="all")
    assert not torch.allclose(logits(built, whole), logits(built, mean), atol=0.1)


def test_initial_weights_depend_on_the_generator_alone():
    torch.manual_seed(1)
    one = network(seed=3).state_dict()
    torch.manual_seed(2)
    same, other = network(seed=3).state_dict(), network(seed=4).state_dict()
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        assert not torch.equal(tensor, other[name])


def test_initialise_draws_nothing_from_torchs_global_generator():
    built = architecture_of(load("digits", ["data.size=8"])).build()
    before = torch.get_rng_state()
    initialise(built, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_have_the_spread_that_is_documented():
    built = architecture_of(load("digits", ["network.affine=true", "network.standardise=false"])).build()
    initialise(built, torch.Generator().manual_seed(0))
    for module in built.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 1:
            assert module.weight.std().item() == pytest.approx((2 / (9 * module.out_channels)) ** 0.5, rel=0.1)
        elif isinstance(module, nn.GroupNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
        elif isinstance(module, nn.Linear):
            assert 0.9 / 8 < module.weight.abs().max() <= 1 / 8  # 64 inputs


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["network.groups=5"], r"network\.groups: got 5, takes a number that divides every width, such as 16"),
        (["network.groups=0"], r"network\.groups: got 0"),
        (["network.width=0"], r"network\.width: got 0"),
        (["data.size=7"], r"data\.size: got 7, takes at least 8"),
        (["network.name=vgg16", "data.size=16"], r"data\.size: got 16, takes at least 32"),
        (["network.grops=4"], r"unknown key 'network\.grops'; did you mean 'network\.groups'\?"),
        (["network.name=conv7"], r"unknown network 'conv7'; did you mean 'conv6'\?"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_key(overrides, line):
    with pytest.raises(UserError, match=line):
        architecture_of(load("digits", overrides)).build()


def test_a_network_without_a_name_is_refused_with_the_names_there_are():
    with pytest.raises(UserError, match=r"network\.name: missing \(one of: .*conv6"):
        architecture_of(dataclasses.replace(load("digits"), network={"width": 1.0})).build()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("{name: mlpp}", r"^networks\[1\] of digits: unknown network 'mlpp'; did you mean 'mlp'\?"),
        (
            "{name: mlp, width: x}",
            r"^networks\[1\] of digits: unknown key 'network\.width'; did you mean 'network\.widths'\?",
        ),
    ],
)
def test_a_network_in_a_list_that_no_site_has_is_checked(network: str, message: str):
    config = load("digits", [f"sites=[{{domain: digits, networks: [{{name: mlp}}, {network}]}}]"])
    with pytest.raises(UserError, match=message):
        check_own_options(config)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("{name: lstm}", "network 'lstm': takes inputs of the kind"),
        ("{name: convnet, widths: [4], pools: [7]}", "network.pools: got 7"),
    ],
)
def test_a_sites_own_network_that_does_not_fit_the_data_names_the_site(network: str, message: str):
    config = load("digits", [f"sites=[{{domain: digits}}, {{domain: digits, network: {network}}}]"])
    with pytest.raises(UserError, match=rf"^site-0001 \(digits\): {message}"):
        check(config)
