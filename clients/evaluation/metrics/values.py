"""The values of metrics from their sums. A value that the sums do not define is NaN."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.evaluation.metrics.bins import auroc, average_precision, of_output
from fedloom.clients.evaluation.metrics.sums import CONFIDENCE_ONE, Sums
from fedloom.conf.metrics import CLASS, MULTILABEL, REGRESSION, TOKENS

ROUNDING = 1e-14  # of a variance from sums of squares, relative to these: equal numbers have none

ByClass = Callable[[Sums], list[float]]


@dataclass(frozen=True)
class Formula:
    """How a metric follows from the sum `needs`. `value`: None for a confusion matrix. `by_class`: its values by class."""

    needs: tuple[str, ...]
    value: Callable[[Sums], float] | None = None
    by_class: ByClass | None = None


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _share(name: str) -> Callable[[Sums], float]:
    return lambda sums: float(sums[name][0].double() / sums[name][1])


def _counts(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Return true positives, false positives and false negatives by class or label, float64."""
    if "confusion" in sums:
        table = sums["confusion"].double()
        hit = table.diagonal()
        return hit, table.sum(0) - hit, table.sum(1) - hit
    hit, false, _, missed = sums["labels"].double().T
    return hit, false, missed


def _of_counts(name: str) -> ByClass:
    """Return the function of precision, recall or F1 by class, as torchmetrics has it; NaN for classes without examples
    and predictions.
    """

    def by_class(sums: Sums) -> list[float]:
        from torchmetrics.functional.classification.f_beta import _fbeta_reduce  # slow to import
        from torchmetrics.functional.classification.precision_recall import _precision_recall_reduce

        hit, false, missed = _counts(sums)
        none = torch.zeros_like(hit)
        if name == "f1":
            values = _fbeta_reduce(hit, false, none, missed, beta=1.0, average="none")
        else:
            values = _precision_recall_reduce(name, hit, false, none, missed, average="none")  # pyright: ignore
        empty = (hit + false + missed == 0) & ("confusion" in sums)
        return values.masked_fill(empty, math.nan).tolist()

    return by_class


def _right_by_class(sums: Sums) -> list[float]:
    """Return the share of right answers of each class; NaN without examples."""
    table = sums["confusion"].double()
    return (table.diagonal() / table.sum(1)).tolist()


def _of_bins(name: str, of: Callable[[Tensor, Tensor], float]) -> ByClass:
    def by_class(sums: Sums) -> list[float]:
        return [
            of(*of_output(sums[name], output))
            for output in range(int(sums["confusion" if name == "scores" else "labels"].shape[0]))
        ]

    return by_class


def _averaged(needs: tuple[str, ...], by_class: ByClass) -> Formula:
    return Formula(needs, lambda sums: mean(by_class(sums)), by_class)


def _calibration_error(sums: Sums) -> float:
    """Return the mean distance of accuracy and confidence over 15 bins of confidence, weighted by examples."""
    examples, right, confidence = sums["calibration"].double().T
    return float((right - confidence / CONFIDENCE_ONE).abs().sum() / examples.sum())


def _columns(sums: Sums) -> tuple[Tensor, ...]:
    return tuple(sums["errors"].double().T)


def _mae(sums: Sums) -> float:
    examples, absolute, *_ = _columns(sums)
    return float(absolute.sum() / examples.sum())


def _rmse(sums: Sums) -> float:
    examples, _, square, *_ = _columns(sums)
    return float((square.sum() / examples.sum()).sqrt())


def _r2(sums: Sums) -> float:
    """Return the mean over the outputs of 1 - squared error / variance; NaN if an output's true numbers are all equal."""
    examples, _, square, true, true_square = _columns(sums)
    spread = true_square - true.square() / examples
    return mean((1 - square / spread).masked_fill(spread <= ROUNDING * true_square, math.nan).tolist())


def _perplexity(sums: Sums) -> float:
    total, tokens = sums["log_likelihood"].tolist()
    return math.exp(min(total / tokens, 700.0)) if tokens else math.nan


ACCURACY = Formula(("right",), _share("right"))
FORMULAS = {
    CLASS: {
        "accuracy": ACCURACY,
        "balanced_accuracy": _averaged(("confusion",), _right_by_class),
        "f1": _averaged(("confusion",), _of_counts("f1")),
        "precision": _averaged(("confusion",), _of_counts("precision")),
        "recall": _averaged(("confusion",), _of_counts("recall")),
        "auroc": _averaged(("scores", "confusion"), _of_bins("scores", auroc)),
        "average_precision": _averaged(("scores", "confusion"), _of_bins("scores", average_precision)),
        "confusion_matrix": Formula(("confusion",)),
        "calibration_error": Formula(("calibration",), _calibration_error),
    },
    MULTILABEL: {
        "f1": _averaged(("labels",), _of_counts("f1")),
        "precision": _averaged(("labels",), _of_counts("precision")),
        "recall": _averaged(("labels",), _of_counts("recall")),
        "auroc": _averaged(("label_scores", "labels"), _of_bins("label_scores", auroc)),
        "average_precision": _averaged(("label_scores", "labels"), _of_bins("label_scores", average_precision)),
        "subset_accuracy": Formula(("subsets",), _share("subsets")),
    },
    REGRESSION: {
        "mae": Formula(("errors",), _mae),
        "rmse": Formula(("errors",), _rmse),
        "r2": Formula(("errors",), _r2),
    },
    TOKENS: {"accuracy": ACCURACY, "perplexity": Formula(("log_likelihood",), _perplexity)},
}  # fmt: skip
