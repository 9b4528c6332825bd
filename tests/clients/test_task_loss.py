"""The task's loss: torch's label smoothing, the same in all objectives, and none of it in what is measured."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.clients.objectives.layer_selection.search import Exact, Sampled
from fedloom.clients.training.learner import descend
from fedloom.clients.training.loss import full, task_loss
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.schema import TrainingConfig
from tests.clients.test_layer_selection import CHAIN, built, drawn, every, layers, step_of, uniform


@given(st.integers(1, 6), st.integers(2, 5), st.floats(0.0, 1.0), st.integers(0, 99))
def test_it_is_torchs_cross_entropy_and_the_formula(images: int, classes: int, smoothing: float, seed: int):
    draw = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(images, classes, generator=draw), torch.randint(classes, (images,), generator=draw)
    found = task_loss(scores, labels, smoothing)
    assert torch.equal(found, F.cross_entropy(scores, labels, label_smoothing=smoothing))
    targets = (1 - smoothing) * F.one_hot(labels, classes) + smoothing / classes
    torch.testing.assert_close(found, -(targets * scores.log_softmax(1)).sum(1).mean(), rtol=1e-4, atol=1e-5)
    assert torch.equal(task_loss(scores, labels, 0.0), F.cross_entropy(scores, labels))


def test_scores_of_half_precision_are_summed_up_in_float32_and_double_ones_stay():
    scores = torch.randn(4, 3, dtype=torch.bfloat16)
    assert task_loss(scores, torch.zeros(4, dtype=torch.int64), 0.1).dtype == full(scores).dtype == torch.float32
    assert full(scores.double()).dtype == torch.float64


@pytest.mark.parametrize("search", [Exact(), Sampled(part=1.0)])
def test_layer_selection_smooths_what_it_minimises_and_not_what_it_believes(search: Exact | Sampled):
    network, mine = built(CHAIN), layers(CHAIN, [])
    weights = mine.weights(drawn(mine, network, "shared"), {})
    plain, smooth = (step_of(network, mine, weights, uniform(every(3))) for _ in range(2))
    smooth.smoothing = 0.4
    (loss, posterior), (smoothed, same) = search.step(plain), search.step(smooth)
    assert torch.equal(posterior, same)
    assert not torch.isclose(loss, smoothed)


def test_bf16_keeps_weights_and_gradients_in_float32_and_computes_in_less():
    torch.manual_seed(0)
    network, kinds = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)), set[torch.dtype]()
    steps = [(0.1, torch.randn(6, 1, 8, 8), torch.randint(3, (6,))) for _ in range(3)]
    start = {name: one.clone() for name, one in network.state_dict().items()}

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        scores = network(images)
        kinds.add(scores.dtype)
        return task_loss(scores, labels, 0.0)

    ends = {}
    for precision in ("float32", "bf16"):
        network.load_state_dict(start)
        losses = descend(list(network.parameters()), loss, steps, recipe_of(TrainingConfig(precision=precision)))
        ends[precision] = {name: one.clone() for name, one in network.state_dict().items()}
        assert losses.dtype == torch.float32
        assert {one.dtype for one in network.parameters()} == {torch.float32}
    assert kinds == {torch.float32, torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
    for name, one in ends["float32"].items():
        assert not torch.equal(ends["bf16"][name], one)
        torch.testing.assert_close(ends["bf16"][name], one, rtol=0.1, atol=0.02)
