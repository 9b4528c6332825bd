"""Checks of replies, which the server and workers with partial sums run before they add a contribution."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.protocol.messages import BY_CLASS, CLASSES, METRICS, TOTAL
from fedloom.conf.schema import FederationConfig
from fedloom.fusion.flat import flat_of

MOST_LOSS = 1e30  # losses are averaged
MOST_IMAGES = 2**31  # images that a site can measure on
MOST_CLASSES, MOST_NAME = 100_000, 100  # number of class names of a site, and characters of each


class ReplyError(ValueError):
    """A reply that cannot be used; the message says why."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on a site's contribution; 0: no bound. The section `federation` has options with these names.

    Attributes:
        largest_weight: The largest absolute value of a weight.
        largest_change: The largest L2 norm of a round's change.
        most_samples: The largest number of samples that a site may report.
        clip_change: The L2 norm to which a round's change is clipped.
        counted: A site that reports more samples counts with this number.
    """

    largest_weight: float = 0.0
    largest_change: float = 0.0
    most_samples: int = 0
    clip_change: float = 0.0
    counted: int = 0

    @classmethod
    def of(cls, federation: FederationConfig, images: int) -> "Bounds":
        """Return the configured bounds for a site with `images` training examples."""
        return cls(federation.largest_weight, federation.largest_change, federation.most_samples or images,
                   federation.clip_change)  # fmt: skip

    def check(self, kind: str, state: Mapping[str, Tensor], start: Mapping[str, Tensor], *, change: bool = True) -> None:
        """Check the floating-point weights of a record.

        Args:
            kind: The record's name, for the error.
            state: The record.
            start: The weights from which the site started.
            change: Whether to check the distance from `start`, too.

        Raises:
            ReplyError: A weight is too large, or the weights are too far from `start`.
        """
        floats = {name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point and tensor.numel()}
        if not floats or not (self.largest_weight or self.largest_change):
            return
        weights = _vector(state, floats)
        low, high = torch.aminmax(weights)
        if self.largest_weight and self.largest_weight < max(-float(low), float(high)) < math.inf:
            name, largest = max(
                ((name, float(tensor.abs().max())) for name, tensor in floats.items()), key=lambda pair: pair[1]
            )
            fault = f"record '{kind}', tensor '{name}' has an entry of size {largest:.3g}"
            raise ReplyError(f"{fault}, more than federation.largest_weight={self.largest_weight:g}")
        if self.largest_change and change:
            moved = float(torch.dist(weights, _vector(start, floats)))
            if self.largest_change < moved < math.inf:
                fault = f"record '{kind}' moved by {moved:.3g} (L2 norm) in a round"
                raise ReplyError(f"{fault}, more than federation.largest_change={self.largest_change:g}")

    def clipped(self, state: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Clip a record's change from `start` to the L2 norm `clip_change`, over its floating-point weights.

        Returns the record, and the norm before clipping (0 if nothing was clipped). Values that are not finite stay so.
        """
        if not self.clip_change:
            return dict(state) if not isinstance(state, dict) else state, 0.0
        floats = {name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point}
        moved = math.hypot(*(float(torch.dist(tensor, start[name])) for name, tensor in floats.items()))
        if not self.clip_change < moved < math.inf:
            return dict(state), 0.0
        share = self.clip_change / moved
        near = {name: torch.lerp(start[name].to(tensor), tensor, share) for name, tensor in floats.items()}
        return {**state, **near}, moved


def _vector(state: Mapping[str, Tensor], named: Iterable[str]) -> Tensor:
    """Return the named tensors as one vector."""
    whole = flat_of(state)
    if whole is not None and list(whole) == list(named):
        return whole.vector
    return torch.cat([state[name].flatten() for name in named])


FREE = Bounds()


def train_numbers(content: RecordDict, bounds: Bounds, hidden: bool = False) -> dict[str, float]:
    """Return the numbers in a reply to TRAIN.

    Args:
        content: The reply's content.
        bounds: The bounds on the site's samples.
        hidden: Whether the run uses masks or noise. Then a site may withhold its loss.

    Returns:
        "samples", "loss" (if sent) and "epsilon" (the privacy cost, if sent).

    Raises:
        ReplyError: A number is missing or not valid.
    """
    metrics = content.metric_records.get(METRICS) or {}
    loss, samples, cost = (metrics.get(name) for name in ("loss", "samples", "epsilon"))
    if not isinstance(samples, int) or not 1 <= samples < 2**31:
        raise ReplyError(f"the reply has no record '{METRICS}' with a finite loss and a positive number of samples")
    numbers: dict[str, float] = {"samples": samples}
    if isinstance(loss, float) and abs(loss) < MOST_LOSS:
        numbers["loss"] = loss
    elif loss is not None or not hidden:
        raise ReplyError(f"the reply has no record '{METRICS}' with a finite loss and a positive number of samples")
    check_samples(samples, bounds)
    numbers["samples"] = min(samples, bounds.counted) if bounds.counted else samples
    return numbers | ({"epsilon": cost} if isinstance(cost, float) and 0 <= cost < MOST_LOSS else {})


def asked_numbers(content: RecordDict, names: Sequence[str], bounds: Bounds) -> dict[str, float]:
    """Return all finite numbers in a reply to a question, by name. Raises ReplyError if one of `names` is missing."""
    numbers = check_numbers(content, names)
    if "samples" in numbers:
        check_samples(numbers["samples"], bounds)
        numbers["samples"] = min(numbers["samples"], bounds.counted) if bounds.counted else numbers["samples"]
    return numbers


def check_samples(samples: object, bounds: Bounds) -> None:
    """Raise ReplyError unless a site's number of samples is positive and at most bounds.most_samples (0: no bound)."""
    if not isinstance(samples, int) or not 1 <= samples < 2**31:
        raise ReplyError("the reply's number of samples is not positive")
    if bounds.most_samples and samples > bounds.most_samples:
        raise ReplyError(
            f"the site claims {samples} samples and has {bounds.most_samples} (federation.most_samples sets another bound)"
        )


def check_record(
    kind: str, state: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor], integers: bool | None = None
) -> None:
    """Check names, shapes and dtypes of a reply's record. Raises ReplyError naming the record and the tensor.

    `integers`: True: all tensors are int64; False: all are floating point; None: as in `expected`.
    """
    if state is None:
        raise ReplyError(f"the reply has no record '{kind}'")
    if missing := expected.keys() - state.keys():
        raise ReplyError(f"record '{kind}' lacks the tensor '{min(missing)}'")
    if odd := state.keys() - expected.keys():
        raise ReplyError(f"record '{kind}' has an unknown tensor '{min(odd)}'")
    for name, tensor in state.items():
        is_integer = expected[name].dtype == torch.int64 if integers is None else integers
        if tensor.dtype != torch.int64 if is_integer else not tensor.dtype.is_floating_point:
            wanted = "int64" if is_integer else "floating point"
            raise ReplyError(f"record '{kind}', tensor '{name}': {tensor.dtype}, expected {wanted}")
        if tensor.shape != expected[name].shape:
            raise ReplyError(
                f"record '{kind}', tensor '{name}': shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )


def read_names(content: RecordDict, key: str = "names") -> tuple[str, ...]:
    """Return the class names in a reply to ENROL, in the order of their numbers; empty without names.

    `key`: `names`; `things`, which also say what numbers stand for; or `columns`, the names of features. Raises ReplyError.
    """
    names = content.config_records.get(CLASSES, ConfigRecord()).get(key, [])
    if not isinstance(names, list) or len(names) > MOST_CLASSES or not all(isinstance(name, str) for name in names):
        raise ReplyError(f"the reply's record '{CLASSES}' must be a list of at most {MOST_CLASSES} names")
    return tuple(str(name)[:MOST_NAME] for name in names)


def can_be(right: float, total: float) -> bool:
    """Return whether `right` answers on `total` images are possible: whole numbers, right at most total."""
    return isinstance(right, int) and isinstance(total, int) and 0 <= right <= total <= MOST_IMAGES


def check_score(content: RecordDict, name: str) -> Score:
    """Return the right answers that a reply reports under `name`, and all images, also by class if the reply has them.

    Raises ReplyError unless all counts are possible and those of the classes add up to the totals.
    """
    numbers = check_numbers(content, [name, TOTAL])
    if not can_be(numbers[name], numbers[TOTAL]):
        raise ReplyError(f"the reply's number '{name}' of right answers is impossible")
    metrics, both = content.metric_records[METRICS], (int(numbers[name]), int(numbers[TOTAL]))
    right, total = metrics.get(BY_CLASS + name), metrics.get(BY_CLASS + TOTAL)
    if right is None and total is None:
        return Score(*both)
    error = ReplyError(f"the reply's numbers '{name}' of right answers by class are impossible")
    if not isinstance(right, list) or not isinstance(total, list) or len(right) != len(total) or len(right) > MOST_CLASSES:
        raise error
    pairs = list(zip(right, total, strict=True))
    if not all(can_be(*pair) for pair in pairs) or (sum(right), sum(total)) != both:
        raise error
    return Score(*both, {number: (int(hit), int(count)) for number, (hit, count) in enumerate(pairs) if count})


def check_numbers(content: RecordDict, names: Sequence[str]) -> dict[str, float]:
    """Return all finite numbers in a reply's METRICS, by name. Raises ReplyError if one of `names` is missing."""
    metrics = content.metric_records.get(METRICS) or {}
    numbers = {str(name): value for name, value in metrics.items() if isinstance(value, int | float)}
    finite: dict[str, float] = {name: value for name, value in numbers.items() if abs(value) < MOST_LOSS}
    if missing := [name for name in names if name not in finite]:
        raise ReplyError(f"the reply has no finite number '{missing[0]}' in its record '{METRICS}'")
    return finite
