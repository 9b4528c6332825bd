"""Checks of the sums of metrics in a reply: a site can falsify its own part, but nothing else."""

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedloom.clients.evaluation.metrics import Metrics, Sums
from fedloom.clients.evaluation.metrics.bins import BINS, COLUMNS
from fedloom.clients.evaluation.metrics.sums import CONFIDENCE_BINS, CONFIDENCE_ONE, PAIRS, STATISTICS
from fedloom.clients.protocol.messages import to_states
from fedloom.clients.protocol.reply_checks import MOST_IMAGES, ReplyError

MOST_SQUARE = 1e60  # of sums of squared numbers: standardise.LARGEST**2 for each of MOST_IMAGES is less
NEAR = 1e-6  # relative rounding of sums of floating-point numbers


def check_sums(
    content: RecordDict, name: str, metrics: Metrics, images: int, outputs: int, steps: int = 1
) -> dict[str, Tensor]:
    """Return the sums in a reply's record `name`; empty if the site sends none.

    Args:
        content: The reply.
        name: The record.
        metrics: The metrics that the server asked for.
        images: The number of examples that the site reports.
        outputs: The number of the network's outputs for this site.
        steps: The most targets of an example: the steps of a text, else 1.

    Raises:
        ReplyError: A sum is not one of `images` examples.
    """
    if name not in content.array_records or not images:
        return {}
    try:
        state = to_states(RecordDict({name: content.array_records[name]}))[name]
    except Exception:  # bytes from outside
        raise ReplyError(f"record '{name}' cannot be read") from None
    asked = {each.name: each for each in metrics.statistics}
    sums = {key: tensor for key, tensor in state.items() if key in asked}
    for key, tensor in sums.items():
        if fault := _fault(key, tensor, images, outputs, steps):
            raise ReplyError(f"record '{name}': the sum '{key}' {fault}")
    if {"right", "log_likelihood"} <= sums.keys() and int(sums["right"][1]) != int(sums["log_likelihood"][1]):
        raise ReplyError(f"record '{name}': the sums 'right' and 'log_likelihood' are of different numbers of targets")
    return sums


def _fault(key: str, tensor: Tensor, images: int, outputs: int, steps: int = 1) -> str:
    """Return why a sum is impossible; empty if it is possible."""
    if key not in STATISTICS:  # the states of a user's metric, from a simulated site
        return "" if bool(tensor.isfinite().all()) else "is not finite"
    whole = key not in ("errors", "log_likelihood")
    if tensor.dtype != (torch.int64 if whole else torch.float64):
        return f"has the type {tensor.dtype}"
    if tensor.ndim != (1 if key in ("right", "subsets", "log_likelihood") else 2) or not SHAPES[key](
        tensor, outputs, images
    ):
        return f"has the shape {list(tensor.shape)}"
    limit = MOST_SQUARE if not whole else MOST_IMAGES * (CONFIDENCE_ONE if key == "calibration" else 1)
    counts = tensor[:, 1:] if STATISTICS[key].sparse else tensor
    if not bool((counts.abs() <= limit).all()) or (whole and bool((tensor < 0).any())):  # NaN is not <= limit
        return "has an impossible entry"
    if STATISTICS[key].sparse and not _keys_fit(key, tensor[:, 0], outputs):
        return "has impossible keys"
    if STATISTICS[key].sparse and bool((counts.sum(1) < 1).any()):
        return "has empty rows"
    if key in ("right", "log_likelihood") and int(tensor[1]) > images * steps:
        return f"is of more than {steps} targets for each of {images} examples"
    return "" if TOTALS[key](tensor, images) else f"is not one of {images} examples"


def _keys_fit(key: str, keys: Tensor, outputs: int) -> bool:
    """Return whether a sparse table's keys ascend, and belong to the network's outputs."""
    most = outputs * (PAIRS * PAIRS if key == "against" else BINS)
    return bool((keys.diff() > 0).all()) and (not len(keys) or int(keys[-1]) < most)


def _same(value: Tensor | int, images: int) -> bool:
    return int(value) == images


def _of_each_output(table: Tensor, images: int, width: int) -> bool:
    """Return whether every output of a sparse table that has rows has `images` examples."""
    owner, counts = table[:, 0] // width, table[:, 1:].sum(1)
    totals = torch.zeros(int(owner.max()) + 1 if len(owner) else 1, dtype=torch.int64).index_add_(0, owner, counts)
    return len(owner) > 0 and bool((totals == images).all())


def _calibrated(table: Tensor, images: int) -> bool:
    examples, right, confidence = table.T
    return (
        _same(examples.sum(), images)
        and bool((right <= examples).all())
        and bool((confidence <= examples * CONFIDENCE_ONE).all())
    )


def _errors(table: Tensor, images: int) -> bool:
    """Return whether the squares are at least what the sums imply (Cauchy and Schwarz)."""
    examples, absolute, square, true, true_square = table.T
    fits = (absolute.square() <= images * square * (1 + NEAR)) & (true.square() <= images * true_square * (1 + NEAR))
    return bool(((examples == images) & (absolute >= 0) & fits).all())


def _likely(pair: Tensor, images: int) -> bool:
    loss, tokens = pair.tolist()
    return loss >= 0 and 0 <= tokens <= MOST_IMAGES and tokens == int(tokens)


def _part_of(pair: Tensor, images: int) -> bool:
    return 0 <= int(pair[0]) <= int(pair[1])


SHAPES = {
    "right": lambda tensor, outputs, images: len(tensor) == 2,
    "subsets": lambda tensor, outputs, images: len(tensor) == 2,
    "log_likelihood": lambda tensor, outputs, images: len(tensor) == 2,
    "confusion": lambda tensor, outputs, images: tensor.shape == (outputs, outputs),
    "calibration": lambda tensor, outputs, images: tensor.shape == (CONFIDENCE_BINS, 3),
    "labels": lambda tensor, outputs, images: tensor.shape == (outputs, 4),
    "errors": lambda tensor, outputs, images: tensor.shape == (outputs, 5),
    "scores": lambda tensor, outputs, images: tensor.shape[1] == COLUMNS and len(tensor) <= outputs * images,
    "label_scores": lambda tensor, outputs, images: tensor.shape[1] == COLUMNS and len(tensor) <= outputs * images,
    "against": lambda tensor, outputs, images: tensor.shape[1] == 2 and len(tensor) <= outputs * images,
}
TOTALS = {
    "right": _part_of,
    "subsets": lambda pair, images: _part_of(pair, images) and _same(pair[1], images),
    "log_likelihood": _likely,
    "confusion": lambda table, images: _same(table.sum(), images),
    "calibration": _calibrated,
    "labels": lambda table, images: bool((table.sum(1) == images).all()),
    "errors": _errors,
    "scores": lambda table, images: _of_each_output(table, images, BINS) and _same(table[:, 2].sum(), images),
    "label_scores": lambda table, images: _of_each_output(table, images, BINS),
    "against": lambda table, images: _of_each_output(table, images, PAIRS * PAIRS),
}


def agree(sums: Sums, right: int, images: int) -> bool:
    """Return whether the sums of classes have the same right answers as the reply's numbers."""
    hits = [int(sums["right"][0])] if "right" in sums else []
    hits += [int(sums["confusion"].trace())] if "confusion" in sums else []
    hits += [int(sums["calibration"][:, 1].sum())] if "calibration" in sums else []
    many = int(sums["right"][1]) if "right" in sums else images
    return all(each == right for each in hits) and many == images
