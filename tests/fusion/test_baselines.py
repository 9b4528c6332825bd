"""What fusion is compared with, and the search for mixing weights."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.conf.errors import UserError
from fedloom.fusion.baselines import Ensemble, naive_average
from fedloom.fusion.search import STEPS, best_weights
from tests.fusion.parts import apart, images, network, outputs

TEST = images(5)


@pytest.mark.parametrize("number", [2, 3])
def test_naive_average(number):
    networks = [network("resnet18:width=0.0625", seed) for seed in range(number)]
    mean = naive_average(networks)
    for name, tensor in mean.state_dict().items():
        states = [built.state_dict()[name] for built in networks]
        expected = torch.stack(states).mean(dim=0) if tensor.is_floating_point() else states[0]
        torch.testing.assert_close(tensor, expected)
    assert apart(naive_average([networks[0]] * number), networks[0], TEST) < 1e-9


@pytest.mark.parametrize(
    ("one", "other", "tensor"),
    [
        ("mlp:widths=[6,5]", "mlp:widths=[6,4]", "extractor.3.weight"),
        ("mlp:widths=[6,5]", "mlp:widths=[6]", "(extractor.3|head).weight"),
        ("resnet18:width=0.0625", "resnet34:width=0.0625", "extractor.stage1.2.branch.0.weight"),
    ],
)
def test_networks_of_other_shapes_have_no_average(one, other, tensor):
    for texts in ((one, other), (other, one)):
        with pytest.raises(UserError, match=rf"naive average: tensor '{tensor}' has shapes .*; use networks of one shape"):
            naive_average([network(text) for text in texts])


def test_ensemble():
    networks = [network("mlp:widths=[6,5]", seed) for seed in range(3)]
    together = Ensemble(networks)
    shares = outputs(together, TEST)
    torch.testing.assert_close(shares, sum(outputs(built, TEST).softmax(dim=1) for built in networks) / 3)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(5).double())
    assert len(list(together.parameters())) == sum(len(list(built.parameters())) for built in networks)


class Mixed(nn.Module):
    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__()
        self.weights = list(weights)


def near(goal: Sequence[float]):
    def score(made: nn.Module) -> float:
        assert isinstance(made, Mixed)
        return -sum((ours - theirs) ** 2 for ours, theirs in zip(made.weights, goal, strict=True))

    return score


@pytest.mark.parametrize("share", STEPS)
def test_the_best_of_the_steps_is_found(share):
    weights, made = best_weights(Mixed, near([share + 0.02, 0.98 - share]), 2)
    assert weights == pytest.approx([share, 1 - share])
    assert isinstance(made, Mixed) and made.weights == weights


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4).filter(lambda goal: sum(goal) > 0.1))
@settings(max_examples=60, deadline=None)
def test_the_weights_add_up_and_are_not_worse_than_even_ones(goal):
    number = len(goal)
    score = near([part / sum(goal) for part in goal])
    weights, made = best_weights(Mixed, score, number)
    assert sum(weights) == pytest.approx(1.0) and min(weights) >= 0.0
    assert isinstance(made, Mixed) and made.weights == weights
    assert score(made) >= score(Mixed([1 / number] * number))


def test_of_equal_scores_the_even_weights_win():
    for number in (2, 3, 5):
        assert best_weights(Mixed, lambda _: 0.5, number)[0] == pytest.approx([1 / number] * number)
