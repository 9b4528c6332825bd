"""Metrics from sums equal those of torchmetrics on all examples together."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score
from torch import nn
from torchmetrics.functional import classification, regression
from torchmetrics.functional.text import perplexity

from fedloom.clients.data import Examples, to_float
from fedloom.clients.evaluation.accuracy import score
from fedloom.clients.evaluation.metrics.bins import auroc, bins_of, histogram, margins, of_output
from fedloom.clients.evaluation.metrics.chosen import Metric, Metrics
from fedloom.clients.evaluation.metrics.sums import STATISTICS, numbers_of, weighted
from fedloom.clients.evaluation.metrics.values import FORMULAS
from fedloom.conf.metrics import CLASS, KNOWN, MULTILABEL, REGRESSION, TOKENS

CLASSES = 4


def metrics_for(kind):
    """Return all metrics for targets of a kind."""
    return Metrics(kind, tuple(Metric(KNOWN[name], kind) for name in FORMULAS[kind]))


def values_of(kind, scores, targets, parts=5):
    """Return the values of all metrics, from sums over parts of the examples."""
    metrics = metrics_for(kind)
    pieces = zip(scores.tensor_split(parts), targets.tensor_split(parts), strict=True)
    return metrics.values(metrics.added([metrics.sums(*piece) for piece in pieces]))


def of_torchmetrics(function, scores, targets, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(function(scores, targets, **options))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


def test_metrics_of_classes_equal_those_of_torchmetrics(generator):
    targets = torch.multinomial(torch.tensor([0.7, 0.2, 0.07, 0.03]), 600, replacement=True, generator=generator)
    scores = torch.randn(600, CLASSES, generator=generator) + 1.5 * torch.nn.functional.one_hot(targets, CLASSES)
    found = values_of(CLASS, scores, targets)
    many = {"num_classes": CLASSES}
    expected = {
        "accuracy": of_torchmetrics(classification.multiclass_accuracy, scores, targets, **many, average="micro"),
        "balanced_accuracy": balanced_accuracy_score(targets, scores.argmax(1)),
        "f1": of_torchmetrics(classification.multiclass_f1_score, scores, targets, **many),
        "precision": of_torchmetrics(classification.multiclass_precision, scores, targets, **many),
        "recall": of_torchmetrics(classification.multiclass_recall, scores, targets, **many),
        "auroc": of_torchmetrics(classification.multiclass_auroc, scores, targets, **many),
        "average_precision": of_torchmetrics(classification.multiclass_average_precision, scores, targets, **many),
        "calibration_error": of_torchmetrics(classification.multiclass_calibration_error, scores, targets, **many),
    }
    assert found == pytest.approx(expected, abs=1e-5)
    metrics = metrics_for(CLASS)
    sums = metrics.sums(scores, targets)
    confusion = classification.multiclass_confusion_matrix(scores, targets, num_classes=CLASSES)
    assert torch.equal(sums["confusion"], confusion)
    by_class = classification.multiclass_f1_score(scores, targets, num_classes=CLASSES, average=None)
    assert metrics.by_class(sums)["f1"] == pytest.approx(by_class.tolist())


def test_metrics_of_labels_equal_those_of_torchmetrics(generator):
    targets = (torch.rand(400, 3, generator=generator) < torch.tensor([0.5, 0.2, 0.05])).float()
    scores = torch.randn(400, 3, generator=generator) + 2 * targets - 1
    found, whole = values_of(MULTILABEL, scores, targets), targets.long()
    named = {"f1": classification.multilabel_f1_score, "precision": classification.multilabel_precision,
             "recall": classification.multilabel_recall, "auroc": classification.multilabel_auroc,
             "average_precision": classification.multilabel_average_precision,
             "subset_accuracy": classification.multilabel_exact_match}  # fmt: skip
    expected = {name: of_torchmetrics(function, scores, whole, num_labels=3) for name, function in named.items()}
    assert found == pytest.approx(expected, abs=1e-5)


def test_metrics_of_numbers_equal_those_of_torchmetrics(generator):
    targets = 50 + 20 * torch.randn(300, 2, generator=generator)
    scores = targets + 5 * torch.randn(300, 2, generator=generator)
    assert values_of(REGRESSION, scores, targets) == pytest.approx({
        "mae": float(regression.mean_absolute_error(scores, targets)),
        "rmse": float(regression.mean_squared_error(scores, targets, squared=False)),
        "r2": float(regression.r2_score(scores, targets)),
    }, rel=1e-5)  # fmt: skip


def test_metrics_of_tokens_leave_out_what_has_no_target(generator):
    scores, targets = torch.randn(20, 7, 11, generator=generator), torch.randint(0, 11, (20, 7), generator=generator)
    targets[torch.rand(20, 7, generator=generator) < 0.3] = -100
    found = values_of(TOKENS, scores, targets)
    assert found["perplexity"] == pytest.approx(float(perplexity(scores, targets, ignore_index=-100)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((scores.argmax(2) == targets)[targets != -100].float().mean()))


def test_a_class_without_examples_has_no_value_and_does_not_count():
    scores, targets = torch.eye(3)[[0, 0, 1]] * 3, torch.tensor([0, 0, 1])
    metrics = metrics_for(CLASS)
    sums = metrics.sums(scores, targets)
    assert str(metrics.by_class(sums)["f1"][2]) == "nan" and metrics.values(sums)["balanced_accuracy"] == 1.0
    alone = metrics.sums(scores[:2], targets[:2])
    assert "auroc" not in metrics.values(alone) and metrics.values(alone)["accuracy"] == 1.0


def test_weighted_sums_count_a_part_of_each_example(generator):
    scores, targets = torch.randn(90, CLASSES, generator=generator), torch.randint(0, CLASSES, (90,), generator=generator)
    metrics = metrics_for(CLASS)
    sums = metrics.sums(scores, targets)
    assert metrics.values(weighted(sums, 0.25)) == pytest.approx(metrics.values(sums))
    both = metrics.added([weighted(sums, 0.5), weighted(sums, 0.5)])
    assert metrics.values(both) == pytest.approx(metrics.values(sums))


def distributions(seed, n, place, spread, gap, logistic):
    """Return binary logits whose differences have this place and spread, and labels."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.3
    noise = (
        torch.rand(n, generator=generator, dtype=torch.float64)
        if logistic
        else torch.randn(n, generator=generator, dtype=torch.float64)
    )
    differences = place + spread * (noise + gap * positive)
    return torch.stack([torch.zeros_like(differences), differences], dim=1), positive.long()


def exact_auroc(scores, positive):
    """Return the share of pairs in the right order; equal scores count half."""
    good, bad = scores[positive], scores[~positive]
    return float(((good[:, None] > bad).double() + 0.5 * (good[:, None] == bad)).mean())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    n=st.integers(20, 800),
    place=st.sampled_from([0.0, 1e-6, 0.5, -3.0, 6.9, 20.0, -200.0]),
    size=st.sampled_from([1e-3, 0.02, 1.0, 30.0]),
    gap=st.floats(0, 3),
    uniform=st.booleans(),
)
def test_auroc_from_bins_is_within_two_thousandths(seed, n, place, size, gap, uniform):
    scores, targets = distributions(seed, n, place, size * max(abs(place), 1e-3), gap, uniform)
    if 0 < targets.sum() < n:
        difference = scores[:, 1] - scores[:, 0]
        found = auroc(*of_output(histogram(margins(scores), targets[:, None] == torch.arange(2)), 1))
        assert abs(found - exact_auroc(difference, targets.bool())) <= 0.002


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), low=st.sampled_from([0.0, 0.4, 0.999, 0.99999]), gap=st.floats(0, 1))
def test_auroc_is_close_where_all_probabilities_are_nearly_one(seed, low, gap):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(500, generator=generator) < 0.5
    share = torch.rand(500, generator=generator, dtype=torch.float64) ** (1 + gap * positive)
    chance = low + (1 - low) * share.clamp(1e-9, 1 - 1e-9)
    scores = torch.stack([(1 - chance).log(), chance.log()], dim=1)
    found = auroc(*of_output(histogram(margins(scores), positive[:, None] == torch.tensor([False, True])), 1))
    assert abs(found - exact_auroc(chance, positive)) <= 0.002


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=2, max_size=50))
def test_bins_have_the_order_of_the_scores(values):
    scores = torch.tensor(values)
    bins, order = bins_of(scores), scores.argsort()
    assert bool((bins[order].diff() >= 0).all()) and 0 <= int(bins.min()) <= int(bins.max()) < 2**24


def test_pairs_of_predicted_and_true_numbers_are_close_to_the_numbers(generator):
    numbers = torch.cat([30 + 9 * torch.randn(200, 1, generator=generator), -torch.rand(50, 1, generator=generator)])
    table = STATISTICS["against"].of(numbers, numbers)
    middle = numbers_of(table[:, 0] % 2**13)
    assert int(table[:, 1].sum()) == 250
    near = (middle[:, None] - numbers.double().flatten()).abs().min(1).values
    assert bool((near <= middle.abs() / 16).all())


@pytest.mark.parametrize("kind", [REGRESSION, MULTILABEL, TOKENS])
def test_networks_with_other_targets_are_measured_by_batches(kind, generator):
    pixels = torch.randint(0, 256, (50, 1, 2, 3), dtype=torch.uint8, generator=generator)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), *([nn.Unflatten(1, (2, 2))] if kind == TOKENS else []))
    targets = {
        REGRESSION: torch.randn(50, 4, generator=generator),
        MULTILABEL: (torch.rand(50, 4, generator=generator) < 0.4).float(),
        TOKENS: torch.randint(0, 2, (50, 2), generator=generator),
    }[kind]
    metrics = metrics_for(kind)
    found = score(network.eval(), Examples(pixels, targets), 7, torch.device("cpu"), metrics)
    with torch.no_grad():
        whole = metrics.values(metrics.sums(network(to_float(pixels)), targets))
    assert found.images == 50 and metrics.values(found.sums) == pytest.approx(whole, rel=1e-5)
