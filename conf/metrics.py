"""The metrics by name: which targets they fit, how they are shown, and which direction is better. Needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.plugins import is_reference
from fedloom.conf.registry import section_of

KEY = "evaluation.metrics"
CLASS, MULTILABEL, REGRESSION, TOKENS = "class", "multilabel", "regression", "tokens"  # kinds of targets
TARGETS = {CLASS: "classes", MULTILABEL: "several labels for each example", REGRESSION: "numbers", TOKENS: "tokens"}
AS_NUMBERS = "to predict numbers, write task=regression behind the path"
ACCURACY = "accuracy"


@dataclass(frozen=True)
class Facts:
    """What a metric is, without its computation.

    Attributes:
        name: Its name in configurations and files.
        title: Its name in sentences.
        kinds: The kinds of targets that it fits.
        higher_is_better: Whether a larger value is better.
        share: Whether its values are shares, shown in per cent.
        number: Whether it is a number, which a curve can show. The confusion matrix is not.
        low, high: The smallest and largest possible value; unknown for a user's metric.
    """

    name: str
    title: str
    kinds: tuple[str, ...] = tuple(TARGETS)
    higher_is_better: bool = True
    share: bool = False
    number: bool = True
    low: float = -math.inf
    high: float = math.inf

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and largest possible value."""
        return (0.0, 1.0) if self.share else (self.low, self.high)

    @property
    def caption(self) -> str:
        """The title with a capital letter, for the beginning of a sentence."""
        return self.title[:1].upper() + self.title[1:]

    def text(self, value: float | None) -> str:
        """Return a value as text: a share in per cent, another number with four digits, '-' without a value."""
        if value is None or math.isnan(value):
            return "-"
        return f"{100 * value:.1f}%" if self.share else f"{value:#.4g}".rstrip(".")

    def best(self, values: Sequence[float]) -> float:
        """Return the best of at least one value."""
        return max(values) if self.higher_is_better else min(values)

    def worth(self, value: float) -> float:
        """Return a value that is larger where the metric is better."""
        return value if self.higher_is_better else -value


KNOWN = {facts.name: facts for facts in (
    Facts(ACCURACY, "accuracy", (CLASS, TOKENS), share=True),
    Facts("balanced_accuracy", "balanced accuracy", (CLASS,), share=True),
    Facts("f1", "macro F1", (CLASS, MULTILABEL), share=True),
    Facts("precision", "macro precision", (CLASS, MULTILABEL), share=True),
    Facts("recall", "macro recall", (CLASS, MULTILABEL), share=True),
    Facts("subset_accuracy", "subset accuracy", (MULTILABEL,), share=True),
    Facts("auroc", "macro AUROC", (CLASS, MULTILABEL), low=0.0, high=1.0),
    Facts("average_precision", "macro average precision", (CLASS, MULTILABEL), low=0.0, high=1.0),
    Facts("confusion_matrix", "confusion matrix", (CLASS,), number=False),
    Facts("calibration_error", "calibration error", (CLASS,), higher_is_better=False, low=0.0, high=1.0),
    Facts("mae", "MAE", (REGRESSION,), higher_is_better=False, low=0.0),
    Facts("rmse", "RMSE", (REGRESSION,), higher_is_better=False, low=0.0),
    Facts("r2", "R2", (REGRESSION,), high=1.0),
    Facts("perplexity", "perplexity", (TOKENS,), higher_is_better=False, low=1.0),
)}  # fmt: skip
DEFAULTS = {CLASS: (ACCURACY,), MULTILABEL: ("f1", "auroc"), REGRESSION: ("rmse", "mae", "r2"), TOKENS: ("perplexity",)}


@dataclass(frozen=True)
class Named:
    """An entry of evaluation.metrics: a metric's name or `module:Class`, its options, and its dotted key."""

    reference: str
    options: Mapping[str, Any]
    where: str

    @property
    def own(self) -> bool:
        """Whether the metric is the user's."""
        return is_reference(self.reference)

    @property
    def name(self) -> str:
        """The metric's name in files and tables."""
        return self.reference.rpartition(":")[2].rpartition(".")[2] if self.own else self.reference


def named_metrics(entries: Sequence[Any], kind: str) -> list[Named]:
    """Return the entries of evaluation.metrics for targets of this kind; without entries, the default.

    Raises UserError for an unknown or repeated metric, and for one that does not fit the targets.
    """
    named = [_named(entry, f"{KEY}[{index}]") for index, entry in enumerate(entries or DEFAULTS[kind])]
    for each in named:
        _check(each, kind)
    names = [each.name for each in named]
    if doubles := [each for index, each in enumerate(named) if each.name in names[:index]]:
        raise UserError(f"{doubles[0].where}: '{doubles[0].name}' is listed twice; remove one of the two")
    if not named[0].own and not KNOWN[named[0].name].number:
        fault = f"{named[0].where}: '{named[0].name}' is not a number, so no table can sort by it"
        raise UserError(f"{fault}; write a number such as {DEFAULTS[kind][0]} before it")
    return named


def facts_of(name: str) -> Facts:
    """Return a metric's facts by its name in files. A user's metric is a number whose larger values are better."""
    return KNOWN.get(name) or Facts(name, name)


def _named(entry: Any, where: str) -> Named:
    section = section_of(entry, where, "{name: accuracy}")
    if not isinstance(section.get("name"), str):
        raise UserError(f"{where}.name: missing; write a metric such as {ACCURACY}, or module:Class")
    return Named(section["name"], {key: value for key, value in section.items() if key != "name"}, where)


def _check(named: Named, kind: str) -> None:
    """Raise UserError unless the metric exists, fits the kind of targets, and accepts its options."""
    if named.own:
        return
    if named.reference not in KNOWN:
        raise unknown("metric", named.reference, [f"{name}" for name in KNOWN])
    if named.options:
        raise UserError(f"{named.where}: '{named.name}' takes no options; write only its name")
    if kind not in KNOWN[named.name].kinds:
        fits = ", ".join(name for name, facts in KNOWN.items() if kind in facts.kinds)
        wanted = " or ".join(TARGETS[each] for each in KNOWN[named.name].kinds)
        fault = f"{named.where}: '{named.name}' is for {wanted}, but the targets here are {TARGETS[kind]}"
        numbers = f"; {AS_NUMBERS}" if kind == CLASS and REGRESSION in KNOWN[named.name].kinds else ""
        raise UserError(f"{fault}; write one of: {fits}{numbers}")
