"""The likelihood-ratio attack: on made-up confidences of which the answer is known."""

import numpy as np
import pytest
import torch

from fedloom.conf import UserError
from fedloom.server.unlearning.likelihood import confidence, likelihood_ratio, rate_at


def made_up(gap: float, spread: float = 1.0, federations: int = 16, images: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of forgotten and of never seen images, whose own difficulty differs far more than `gap`."""
    random = np.random.default_rng(0)
    hard = random.normal(0, 20, images)
    return tuple(hard + shift + random.normal(0, spread, (federations, images)) for shift in (gap, 0.0))  # type: ignore[return-value]


def test_confidence_is_the_logit_of_the_true_class_probability():
    logits, labels = torch.tensor([[2.0, 0.0, -1.0], [0.0, 800.0, 0.0]]), torch.tensor([0, 1])
    chance = logits.double().softmax(dim=1)[0, 0]
    found = confidence(logits, labels)
    assert found[0] == pytest.approx(float(torch.log(chance / (1 - chance))))
    assert np.isfinite(found).all()


def test_an_image_by_image_attack_sees_what_no_common_threshold_does():
    forgotten, never = made_up(gap=4.0)
    everywhere = np.ones(forgotten.shape, bool)
    found = likelihood_ratio(forgotten, never, everywhere, everywhere)
    assert found.trials == (3200, 3200)
    assert found.rate > 0.9 and found.area > 0.99
    assert rate_at(forgotten.ravel(), never.ravel(), 0.01) < 0.05


def test_what_does_not_differ_is_found_at_the_rate_of_chance():
    forgotten, never = made_up(gap=0.0)
    everywhere = np.ones(forgotten.shape, bool)
    found = likelihood_ratio(forgotten, never, everywhere, everywhere)
    assert found.rate < 0.03 and abs(found.area - 0.5) < 0.03


def test_a_difference_of_spread_alone_is_found_too():
    wide, narrow = made_up(gap=0.0, spread=5.0)[0], made_up(gap=0.0, spread=1.0)[1]
    everywhere = np.ones(wide.shape, bool)
    assert likelihood_ratio(wide, narrow, everywhere, everywhere).area > 0.8


def test_only_what_counts_is_attacked_and_learned_from():
    forgotten, never = made_up(gap=4.0, federations=8)
    was = np.random.default_rng(1).random(forgotten.shape) < 0.5
    spoiled = np.where(was, forgotten, 1e6)
    found = likelihood_ratio(spoiled, never, was, ~was)
    assert found.trials[0] <= was.sum() and found.rate > 0.8


def test_the_rate_is_at_most_so_many_false_positives():
    inside, outside = np.array([1.0, 2.0, 3.0, 4.0]), np.arange(100.0) / 50
    assert rate_at(inside, outside, 0.01) == 0.75  # above 1.96: one of the others, 1.98, is as well
    assert rate_at(outside, outside, 0.0) == 0.0


def test_few_federations_are_refused():
    values = np.zeros((3, 5))
    with pytest.raises(UserError, match="at least 4 federations"):
        likelihood_ratio(values, values, values == 0, values == 0)
