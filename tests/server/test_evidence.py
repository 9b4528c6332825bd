"""A certificate's measurements: membership inference, distance, disagreement, and the time to relearn."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.clients.data import Examples, site_examples, test_images, to_float
from fedloom.clients.data.form import Form
from fedloom.clients.networks import initialise
from fedloom.clients.networks.small import Mlp
from fedloom.clients.training.learner import DivergedError, descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.sites import SiteConfig
from fedloom.fusion.state import State, digest
from fedloom.server.unlearning.attacks import (
    Attack,
    Floats,
    Relearned,
    _attack,
    area,
    cross_fitted,
    disagreement,
    distance,
    features,
    interval,
    membership,
    time_to_relearn,
)

SCORES = st.lists(st.integers(-4, 4).map(lambda score: score / 4), min_size=1, max_size=30).map(np.array)


def digits(part: str) -> Examples:
    """Real digits of 8x8 pixels: "members" and "strangers" are 200 training examples each, "test" all test examples."""
    config = load("digits", ["sites=[{domain: digits, count: 2, samples: 200}]", "data.size=8"])
    if part == "test":
        return test_images(config, SiteConfig(domain="digits"))
    return site_examples(config, config.roster[["members", "strangers"].index(part)])


def shown(images: Examples, count: int) -> Examples:
    return Examples(images.x[:count], images.y[:count])


def few() -> Examples:
    """So few digits that a network which knows them by heart knows others clearly less well."""
    return shown(digits("members"), 80)


def fresh(seed: int = 0) -> nn.Module:
    network = Mlp(widths=[64]).build(Form.images(digits("members").x.shape[1], 8, 10))
    initialise(network, torch_generator(seed, "evidence"))
    return network.eval()


def trained(images: Examples, steps: int) -> nn.Module:
    """By full-batch descent; 300 steps leave hardly any loss on the images."""
    network = fresh()
    lessons = itertools.repeat((0.1, to_float(images.x), images.y), steps)
    training = TrainingConfig(momentum=0.9)
    descend(list(network.parameters()), lambda x, y: F.cross_entropy(network(x), y), lessons, recipe_of(training))
    return network


@pytest.fixture(scope="module")
def overfitted() -> nn.Module:
    return trained(few(), 300)


@given(SCORES, SCORES)
def test_area_is_the_share_of_pairs_in_order(members: Floats, others: Floats) -> None:
    pairs = [(m > o) + 0.5 * (m == o) for m in members for o in others]
    assert area(members, others) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert area(members, others) + area(others, members) == pytest.approx(1.0)
    assert area(-others, -members) == pytest.approx(area(members, others))


@settings(max_examples=20)
@given(SCORES, SCORES, st.integers(0, 99))
def test_interval_is_that_of_the_resampled_areas(members: Floats, others: Floats, seed: int) -> None:
    random = np.random.default_rng(seed)
    areas = [area(random.choice(members, len(members)), random.choice(others, len(others))) for _ in range(50)]
    expected = np.percentile(areas, [2.5, 97.5])
    assert interval(members, others, np.random.default_rng(seed), 50) == pytest.approx(tuple(expected))


def test_interval_covers_the_true_area() -> None:
    random, covered = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval(random.normal(1.0, size=80), random.normal(0.0, size=60), random, 300)
        covered += low <= 0.7602 <= high  # the normal distribution at 1 / sqrt(2)
    assert 180 <= covered <= 199


def test_the_logistic_attacks_interval_covers_chance_where_nothing_distinguishes_the_sides() -> None:
    random, covered = np.random.default_rng(0), 0
    for seed in range(100):
        found = _attack(cross_fitted(random.normal(size=(60, 3)), random.normal(size=(40, 3)), seed), random, 200)
        covered += found.low <= 0.5 <= found.high
    assert covered >= 90


@pytest.mark.parametrize("others", ["strangers", "test"])
def test_an_overfitted_network_betrays_its_members(overfitted: nn.Module, others: str) -> None:
    found = membership(overfitted, few(), digits(others), seed=0)
    assert list(found) == ["loss", "logistic"]
    for attack in found.values():
        assert 0.55 < attack.low < attack.auc < attack.high <= 1.0
        assert (attack.members, attack.others) == (80, len(digits(others)))


def test_untrained_networks_betray_nobody() -> None:
    found = [membership(fresh(seed), digits("members"), digits("strangers"), seed=seed) for seed in range(10)]
    for name in ("loss", "logistic"):
        attacks = [attacks[name] for attacks in found]
        assert sum(attack.low < 0.5 < attack.high for attack in attacks) >= 9
        assert all(attack.low < attack.auc < attack.high for attack in attacks)


def test_attacks_depend_on_the_seed_alone(overfitted: nn.Module) -> None:
    def attacks(seed: int) -> dict[str, Attack]:
        torch.rand(1)
        return membership(overfitted, few(), digits("test"), seed=seed, resamples=50)

    before = digest(overfitted.state_dict())
    assert attacks(1) == attacks(1)
    assert all(attacks(1)[name] != attacks(2)[name] for name in ("loss", "logistic"))
    assert digest(overfitted.state_dict()) == before


def test_features_of_known_outputs() -> None:
    class Fixed(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]])[: len(input)].log1p()

    images = Examples(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.tensor([2, 0]))
    third = np.log(3.0)
    expected = [
        [third, 1 / 3, np.log(6.0) - np.log(3.0) / 2 - np.log(2.0) / 3, np.log(2 / 3), 0.0],
        [third, 1 / 3, third, 0.0, 1.0],
    ]
    np.testing.assert_allclose(features(Fixed(1, 1), images), expected, atol=1e-6)


@pytest.mark.parametrize("count", [20, 37])
def test_no_model_scores_an_image_that_it_was_fitted_on(count: int) -> None:
    """An image that moves changes its own score in its half, and all scores in the other."""
    random = np.random.default_rng(0)
    inside, outside = random.normal(size=(count, 3)), random.normal(size=(50, 3))
    changed = inside.copy()
    changed[0] += 5.0
    before, after = ([np.concatenate(half) for half in cross_fitted(side, outside, seed=3)] for side in (inside, changed))
    assert sum(map(len, before)) == count + 50 and abs(len(before[0]) - len(before[1])) <= 2
    moved = sorted(int((one != other).sum()) for one, other in zip(before, after, strict=True))
    assert moved[0] == 1 and moved[1] in map(len, before)


def test_the_sides_weigh_the_same_whatever_their_numbers() -> None:
    random = np.random.default_rng(0)
    inside, outside = random.normal(0.5, size=(2000, 1)), random.normal(-0.5, size=(200, 1))
    for members, others in cross_fitted(inside, outside, seed=0):
        assert members.mean() == pytest.approx(-others.mean(), abs=0.2)


@pytest.mark.parametrize(("members", "others", "side"), [(19, 50, "19 members"), (50, 0, "0 others")])
def test_too_few_images_to_attack(members: int, others: int, side: str) -> None:
    with pytest.raises(UserError, match=side):
        membership(fresh(), shown(digits("members"), members), shown(digits("test"), others), seed=0)


def test_twenty_images_suffice() -> None:
    found = membership(fresh(), shown(digits("members"), 20), shown(digits("test"), 20), seed=0, resamples=20)
    assert found["logistic"].members == 20


def test_outputs_that_are_not_finite() -> None:
    network = fresh()
    next(network.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        membership(network, digits("members"), digits("test"), seed=0)


def test_distance_of_known_states() -> None:
    counter = torch.tensor(7)
    one: State = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]]), "steps": counter}
    other: State = {"a": torch.zeros(2), "b": torch.tensor([[2.0]]), "steps": counter + 9}
    assert distance(one, other) == pytest.approx({"euclidean": 13.0**0.5, "relative": 13.0**0.5 / 2.0})
    assert distance(other, one)["relative"] == pytest.approx(13.0**0.5 / 5.0)
    assert distance(one, one) == {"euclidean": 0.0, "relative": 0.0}


def test_distance_is_symmetric_and_a_norm() -> None:
    one, other, third = (dict(fresh(seed).state_dict()) for seed in range(3))
    assert distance(one, other)["euclidean"] == distance(other, one)["euclidean"]
    assert distance(one, third)["euclidean"] <= sum(distance(other, state)["euclidean"] for state in (one, third))
    flat = [torch.cat([tensor.flatten() for tensor in state.values()]) for state in (one, other)]
    assert distance(one, other)["euclidean"] == pytest.approx(float((flat[0] - flat[1]).norm()))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.ones(2)}, "tensor 'b'"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, "tensor 'b'.*\\[1\\].*\\[2\\]"),
        ({"a": torch.ones(2, dtype=torch.int64), "b": torch.ones(1)}, "tensor 'a'.*float32.*int64"),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, "zero everywhere"),
    ],
)
def test_states_that_do_not_fit(other: State, message: str) -> None:
    with pytest.raises(UserError, match=message):
        distance({"a": torch.ones(2), "b": torch.ones(1)}, other)


def test_disagreement(overfitted: nn.Module) -> None:
    images, other = digits("test"), fresh()
    with torch.inference_mode():
        guesses = [network(to_float(images.x)).argmax(dim=1) for network in (overfitted, other)]
    share = disagreement(overfitted, other, images)
    assert share == pytest.approx(float((guesses[0] != guesses[1]).float().mean()))
    assert 0.5 < share == disagreement(other, overfitted, images)
    assert disagreement(overfitted, copy.deepcopy(overfitted), images) == 0.0
    with pytest.raises(UserError):
        disagreement(overfitted, other, shown(images, 0))


def relearned(
    network: nn.Module,
    target: float,
    trains: int = 200,
    tests: int = 359,
    rate: float = 0.05,
    clip: float = 0.0,
    **ways: int,
) -> Relearned:
    train, test = shown(digits("strangers"), trains), shown(digits("test"), tests)
    training = TrainingConfig(batch=32, rate=rate, momentum=0.9, clip=clip)
    return time_to_relearn(network, train, test, target, training, **{"seed": 0, "most": 200, **ways})


def test_what_was_learned_is_relearned_sooner() -> None:
    some = relearned(trained(digits("members"), 15), 0.9)
    none = relearned(fresh(), 0.9)
    assert some.steps is not None and none.steps is not None
    assert 0 < some.steps < none.steps
    for found in (some, none):
        assert found.reached >= found.target == 0.9
        assert (found.steps or 0) % 5 == 0
        assert found.images == 200


def test_what_was_never_forgotten_takes_no_steps(overfitted: nn.Module) -> None:
    assert relearned(overfitted, 0.85).steps == 0


def test_relearning_is_one_run_measured_on_the_way() -> None:
    """Measuring, and stopping early, change nothing of the training (momentum included)."""
    found = relearned(fresh(), 0.85, every=1)
    assert found.steps is not None
    late = relearned(fresh(), 1.01, every=1000, most=found.steps)
    assert (late.steps, late.reached) == (None, found.reached)
    assert relearned(fresh(), 0.85, most=found.steps - 1).steps is None


def test_a_target_out_of_reach() -> None:
    found = relearned(fresh(), 1.01, most=12)
    assert found.steps is None
    assert 0.0 < found.reached < 1.0
    assert relearned(fresh(), 1.01, most=0).steps is None


def test_relearning_depends_on_the_seed_alone_and_leaves_the_network_as_it_was() -> None:
    network = fresh()
    before, runs = digest(network.state_dict()), []
    for seed in (1, 1, 2):
        torch.rand(1)
        runs.append(relearned(network, 1.01, most=20, seed=seed).reached)
    assert runs[0] == runs[1] != runs[2]
    assert digest(network.state_dict()) == before
    assert not network.training and all(parameter.grad is None for parameter in network.parameters())


def test_fewer_images_than_a_batch() -> None:
    found = relearned(fresh(), 1.01, trains=5, most=7)
    assert (found.steps, found.images) == (None, 5)


def test_a_rate_that_is_too_high_is_not_a_forgetting() -> None:
    with pytest.raises(DivergedError, match="smaller rate"):
        relearned(fresh(), 1.01, rate=1e20, most=30)
    assert relearned(fresh(), 1.01, rate=1e20, clip=1e-20, most=30).steps is None


@pytest.mark.parametrize(("trains", "tests", "every"), [(0, 10, 5), (10, 0, 5), (10, 10, 0)])
def test_nothing_to_relearn(trains: int, tests: int, every: int) -> None:
    with pytest.raises(UserError, match="relearning needs"):
        relearned(fresh(), 0.5, trains, tests, every=every)
