"""Arithmetic on networks: what is added is exactly there, what is left out never was, whatever the order of terms."""

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import initialise, parse_name
from fedloom.conf.errors import UserError
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, composed, is_statistic, to_state
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State, digest

BITS, UNIT = 32, 2.0**-32
HOW = [GRADIENTS, WEIGHTS]
LAYERS = ("conv", "norm", "head")
SHAPES = {"conv.weight": (2, 3), "norm.weight": (2,), "norm.running_mean": (2,), "head.weight": (3, 2)}
COUNTER, VARIANCE = "norm.num_batches_tracked", "norm.running_var"

alphas_of_size = st.floats(0.05, 2) | st.floats(-2, -0.05) | st.integers(1, 20).map(lambda tenths: tenths / 10)
settled = settings(deadline=None, max_examples=60)


@st.composite
def networks(draw: st.DrawFn, least: int = 1, most: int = 5) -> list[State]:
    """Float states of one shape, theta_0 and `least` to `most` others; some of so few units that every rounding shows."""
    count, scale = draw(st.integers(least, most)), draw(st.sampled_from([3 * UNIT, 1e-3, 1.0, 30.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(count + 1):
        state = {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        state[VARIANCE] = scale * torch.rand(2, generator=generator)
        state[COUNTER] = torch.randint(10**6, (), generator=generator)
        found.append(state)
    return found


def prepared(states: Sequence[State]) -> tuple[State, list[State]]:
    """theta_0 in integers, and the other networks' changes from it."""
    start, *ends = [quantise(state, BITS) for state in states]
    return start, [{name: tensor - start[name] for name, tensor in end.items()} for end in ends]


def combine(start: State, changes: Sequence[State], alphas: Sequence[Alpha], how: str = GRADIENTS) -> State:
    return composed(start, alphas, changes, how, BITS)


def numbers(data: st.DataObject, count: int) -> list[float]:
    return data.draw(st.lists(alphas_of_size, min_size=count, max_size=count), label="alphas")


def same(one: State, other: State) -> bool:
    return digest(one) == digest(other)


def weights(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not is_statistic(name)}


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, in units."""
    return float((one.double() - other.double()).abs().max())


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(most=1))
def test_the_whole_gradient_on_its_start_is_the_trained_network_bit_for_bit(how, states):
    start, gradients = prepared(states)
    assert same(combine(start, gradients, [1.0], how), quantise(states[1], BITS))


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(least=2), st.data())
def test_a_term_with_coefficient_zero_is_as_if_it_had_never_been_there(how, states, data):
    start, gradients = prepared(states)
    alphas = numbers(data, len(gradients) - 1)
    assert same(combine(start, gradients, [*alphas, 0.0], how), combine(start, gradients[:-1], alphas, how))


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(least=2), alphas_of_size, st.data())
def test_a_term_that_is_added_and_taken_out_again_leaves_the_bits_of_never_having_had_it(how, states, extra, data):
    start, gradients = prepared(states)
    alphas = numbers(data, len(gradients) - 1)
    never = combine(start, gradients[:-1], alphas, how)
    again = combine(start, [*gradients, gradients[-1]], [*alphas, extra, -extra], how)
    assert same(weights(again), weights(never))


@settled
@given(networks(least=2), st.data())
def test_what_a_sum_of_gradients_forgets_leaves_the_bits_of_never_having_had_it(states, data):
    start, gradients = prepared(states)
    alpha = data.draw(alphas_of_size)
    total = ExactSum(BITS)
    for gradient in gradients:
        total.add(gradient)
    total.subtract(gradients[-1])
    never = ExactSum(BITS)
    for gradient in gradients[:-1]:
        never.add(gradient)
    left, right = (composed(start, [alpha], [one.totals], GRADIENTS, BITS) for one in (total, never))
    assert same(left, right)


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(least=2), st.data())
def test_the_order_of_terms_does_not_change_a_bit(how, states, data):
    start, gradients = prepared(states)
    pairs = list(zip(gradients, numbers(data, len(gradients)), strict=True))
    expected = combine(start, gradients, [alpha for _, alpha in pairs], how)
    shuffled = data.draw(st.permutations(pairs))
    assert same(combine(start, [one for one, _ in shuffled], [alpha for _, alpha in shuffled], how), expected)


def in_orders(theta: dict[str, int], changes: Sequence[int], alphas: Sequence[float], how: str) -> set[int]:
    """All that a combination of one tensor can be, its terms in any order."""
    start = {name: torch.tensor([units]) for name, units in theta.items()}
    found = set()
    for order in itertools.permutations(zip(changes, alphas, strict=True)):
        terms = [{name: torch.tensor([units]) for name in theta} for units, _ in order]
        found |= {int(tensor) for tensor in combine(start, terms, [alpha for _, alpha in order], how).values()}
    return found


def test_coefficients_whose_float_sum_depends_on_their_order_give_the_same_bits_in_any_order():
    """0.1 + 0.1 + 1.1 is 1.3, and 1.1 + 0.1 + 0.1 is 1.3000000000000003: 5 units of theta_0 became 6 or 7."""
    assert len(in_orders({"conv.weight": 5}, [0, 0, 0], [0.1, 0.1, 1.1], WEIGHTS)) == 1
    assert len(in_orders({"norm.running_mean": 0}, [90, 0, 0], [0.1, 0.2, 0.9], GRADIENTS)) == 1


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(), st.data())
def test_weights_are_what_the_formula_says_up_to_half_a_unit_per_term(how, states, data):
    start, gradients = prepared(states)
    alphas = numbers(data, len(gradients))
    ends = [quantise(state, BITS) for state in states[1:]]
    for name, found in weights(combine(start, gradients, alphas, how)).items():
        base = start[name].double()
        terms = [end[name].double() - (base if how == GRADIENTS else 0) for end in ends]
        expected = sum((alpha * term for alpha, term in zip(alphas, terms, strict=True)), base * (how == GRADIENTS))
        assert apart(found, expected) <= 0.5 * (len(alphas) + 1) + 0.01, name  # 0.01: the float64 sum itself


@settled
@given(networks(), st.data())
def test_with_coefficients_that_add_up_to_one_weights_are_gradients_up_to_a_unit_per_term(states, data):
    start, gradients = prepared(states)
    sizes = data.draw(st.lists(st.floats(0.1, 1), min_size=len(gradients), max_size=len(gradients)))
    alphas = [size / sum(sizes) for size in sizes]
    one, other = (combine(start, gradients, alphas, how) for how in HOW)
    assert all(apart(one[name], other[name]) <= len(alphas) for name in one)


@settled
@given(networks(), st.data())
def test_gradients_that_are_assigned_to_another_network_change_it_as_their_own_start(states, data):
    start, gradients = prepared(states)
    alphas = numbers(data, len(gradients))
    other = {name: tensor + 2**BITS for name, tensor in start.items()}
    here, there = combine(start, gradients, alphas), combine(other, gradients, alphas)
    assert same({name: there[name] - other[name] for name in weights(other)},
                {name: here[name] - start[name] for name in weights(start)})  # fmt: skip


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -float("inf"), 1e12, {"conv": 1.0, "head": float("nan")}])
def test_a_coefficient_that_is_not_finite_or_beyond_the_range_of_exact_sums_is_refused(alpha):
    start = {"conv.weight": torch.tensor([2**40]), "head.weight": torch.tensor([2**40])}
    with pytest.raises(UserError, match="coefficient"):
        combine(start, [dict(start)], [alpha])


def test_a_layer_without_coefficient_is_named():
    start, gradients = prepared(trained_states())
    with pytest.raises(UserError, match="no coefficient for the layer 'extractor"):
        combine(start, gradients[:1], [{"head": 1.0}])


@settled
@given(networks(), st.data())
def test_statistics_are_the_mean_weighted_by_the_sizes_of_the_coefficients(states, data):
    start, gradients = prepared(states)
    alphas = numbers(data, len(gradients))
    sizes = torch.tensor([abs(alpha) for alpha in alphas], dtype=torch.float64)
    shares = sizes / sizes.sum()
    found = {how: combine(start, gradients, alphas, how) for how in HOW}
    rounding = 0.5 * len(alphas) * (1 + 1 / float(sizes.sum())) + 1
    for name in (name for name in start if is_statistic(name)):
        ends = torch.stack([quantise(state, BITS)[name].double().reshape(-1) for state in states[1:]])
        assert torch.equal(found[GRADIENTS][name], found[WEIGHTS][name])
        assert apart(found[GRADIENTS][name].reshape(-1), shares @ ends) <= rounding, name
        assert found[GRADIENTS][name].shape == start[name].shape


@pytest.mark.parametrize("alpha", [1.0, -1.0, 0.3, 1e-3, 1e-6, 1e-9])
def test_the_statistics_of_one_network_alone_are_its_own_however_small_its_coefficient(alpha):
    states = trained_states()[:2]
    start, gradients = prepared(states)
    found = to_state(combine(start, gradients, [alpha]), states[0], BITS)
    for name in (name for name in start if is_statistic(name)):
        assert torch.allclose(found[name].double(), states[1][name].double(), atol=1e-6), name


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(), st.data())
def test_coefficients_of_zero_leave_the_statistics_of_the_start(how, states, data):
    start, gradients = prepared(states)
    found = combine(start, gradients, [0.0] * len(gradients), how)
    assert all(torch.equal(found[name], start[name]) for name in start if is_statistic(name))
    assert all(torch.equal(found[name], start[name] * (how == GRADIENTS)) for name in weights(start))


@settled
@given(networks(), st.data())
def test_a_combination_is_a_state_that_a_network_can_have(states, data):
    start, gradients = prepared(states)
    found = to_state(combine(start, gradients, numbers(data, len(gradients))), states[0], BITS)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in states[0].items()
    }
    counts = [int(state[COUNTER]) for state in states[1:]]
    assert min(counts) <= int(found[COUNTER]) <= max(counts)
    assert (found[VARIANCE] >= -100 * UNIT).all()  # rounding; BatchNorm adds 1e-5


@settled
@given(networks())
def test_a_state_in_integers_and_back_is_itself_and_counters_are_not_negative(states):
    back = to_state(quantise(states[0], BITS), states[0], BITS)
    assert all(torch.equal(back[name], tensor) for name, tensor in states[0].items() if tensor.dtype == torch.int64)
    assert all(torch.allclose(back[name], tensor, rtol=0, atol=2.0**-BITS) for name, tensor in states[0].items())
    negative = {name: -tensor - 2**BITS for name, tensor in quantise(states[0], BITS).items()}
    assert to_state(negative, states[0], BITS)[COUNTER].item() == 0


@pytest.mark.parametrize("how", HOW)
@settled
@given(networks(), st.data())
def test_each_layer_has_its_own_coefficients(how, states, data):
    start, gradients = prepared(states)
    rows = [dict.fromkeys(LAYERS, 0.0) | {layer: data.draw(alphas_of_size) for layer in LAYERS} for _ in gradients]
    found = combine(start, gradients, rows, how)
    for layer in LAYERS:
        alone = combine(start, gradients, [row[layer] for row in rows], how)
        mine = [name for name in start if name.startswith(layer)]
        assert mine
        assert all(torch.equal(found[name], alone[name]) for name in mine)


# With real networks


def fresh(options: str = "") -> nn.Module:
    network = parse_name(f"conv6:norm=batch,width=0.25{options}", Form.images(1, 16, 10)).build()
    initialise(network, torch.Generator().manual_seed(0))
    return network


@functools.cache
def trained_states(options: str = "") -> list[State]:
    """theta_0, and two networks that were trained from it for a few steps."""
    found = [fresh(options).state_dict()]
    for seed in (1, 2):
        draw, network = torch.Generator().manual_seed(seed), fresh(options)
        optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(2 + seed):
            images, labels = torch.randn(8, 1, 16, 16, generator=draw), torch.randint(10, (8,), generator=draw)
            optimiser.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimiser.step()
        found.append(network.state_dict())
    return [{name: tensor.detach().clone() for name, tensor in state.items()} for state in found]
