"""Convert a user's targets of any task to arrays, and divide them into strata for splits and partitions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.clients.data.arrays import Labelled, numbered
from fedloom.clients.data.form import MOST_VOCABULARY, PADDING, TOKENS
from fedloom.clients.data.schema import CLASS, IGNORED, MULTILABEL, NEXT, REGRESSION, Schema
from fedloom.clients.data.sources import Labels

QUANTILES = 10  # strata of regression targets
MOST_STRATA = 50  # of combinations of labels
CHOOSE = "Write ?task={} behind the path to choose a task."


def convert(
    parts: Mapping[str, Labelled], schema: Schema, task: str = ""
) -> tuple[dict[str, Any], Schema, int, tuple[str, ...]]:
    """Return the targets of each part, the schema with their task, the number of outputs, and names of these.

    Args:
        parts: The user's targets (`labels`) and the names of classes, labels or numbers, by part.
        schema: Of the inputs.
        task: One of schema.TASKS; empty: what the type and shape say.

    Raises:
        ValueError: The targets fit no task, or not this one. The message continues "domain PATH ...".
    """
    arrays = {part: _array(named.targets) for part, named in parts.items()}
    chosen = task or _task(arrays, parts, schema)
    names = next(iter(parts.values())).names
    if chosen == CLASS:
        labels, classes, names = numbered({part: replace(named, targets=_single(arrays[part]))
                                           for part, named in parts.items()}, certain=bool(task))  # fmt: skip
        return labels, replace(schema, task=CLASS), classes, names
    if chosen == NEXT:
        if schema.kind != TOKENS:
            raise ValueError(f"has inputs of the kind {schema.kind}; task=tokens predicts the next of inputs=tokens")
        tokens = {part: _next(array, schema) for part, array in arrays.items()}
        vocabulary = max(schema.vocabulary, *(int(array.max()) + 1 for array in tokens.values()))
        return tokens, replace(schema, task=NEXT, vocabulary=vocabulary), vocabulary, ()
    numbers = {part: _numbers(array, chosen) for part, array in arrays.items()}
    widths = {array.shape[1] for array in numbers.values()}
    if len(widths) > 1:
        raise ValueError(f"has targets of {' and '.join(map(str, sorted(widths)))} numbers in train and test")
    return numbers, replace(schema, task=chosen), widths.pop(), names


def _array(targets: Any) -> np.ndarray:
    array = np.asarray(targets)
    if array.ndim == 0 or len(array) == 0:
        raise ValueError(f"has targets of shape {list(array.shape)}, takes one target per input")
    return array


def _single(array: np.ndarray) -> np.ndarray:
    """Return class numbers of one-hot rows; other arrays as they are."""
    hot = array.ndim == 2 and array.shape[1] > 1 and _binary(array) and bool((array.sum(1) == 1).all())
    return array.argmax(1) if hot else array


def _binary(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" and bool(np.isin(array, (0, 1)).all())


def _task(arrays: Mapping[str, np.ndarray], parts: Mapping[str, Labelled], schema: Schema) -> str:
    """Return the task that the targets' type and shape say. Raises ValueError if several fit."""
    first = next(iter(arrays.values()))
    if first.ndim == 1 or first.shape[1:] == (1,):
        measured = all(array.dtype.kind == "f" and not _whole(array) for array in arrays.values())
        return REGRESSION if measured and not next(iter(parts.values())).names else CLASS
    if schema.kind == TOKENS and first.shape[1:] == schema.shape and first.dtype.kind in "iu":
        return NEXT
    if first.ndim == 2 and all(map(_binary, arrays.values())):
        if all(bool((array.sum(1) == 1).all()) for array in arrays.values()):
            raise ValueError(f"has targets with a single 1 in each row. {CHOOSE.format('class')} Use multilabel if an input "
                             "may have several labels.")  # fmt: skip
        return MULTILABEL
    if first.ndim == 2 and first.dtype.kind == "f":
        return REGRESSION
    raise ValueError(f"has targets of type {first.dtype} and shape {list(first.shape)}. {CHOOSE.format('TASK')}")


def _whole(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all() and (np.mod(array, 1) == 0).all())


def _next(array: np.ndarray, schema: Schema) -> Labels:
    """Return the next tokens: PADDING becomes IGNORED. Raises ValueError unless there is a token for each step."""
    if array.dtype.kind not in "iu" or array.shape[1:] != schema.shape:
        raise ValueError(f"has targets of type {array.dtype} and shape {list(array.shape)}; task=tokens takes a whole "
                         f"number for each step, [n, {schema.shape[0]}]")  # fmt: skip
    known = array[array != IGNORED]
    if not len(known) or known.min() < 0 or known.max() >= MOST_VOCABULARY:
        raise ValueError(f"has targets that are not tokens: takes whole numbers from 1, {PADDING} or {IGNORED} where a step "
                         "has no target")  # fmt: skip
    return np.where(array == PADDING, IGNORED, array).astype(np.int64)


def _numbers(array: np.ndarray, task: str) -> np.ndarray:
    if array.dtype.kind not in "fiub" or array.ndim > 2:
        raise ValueError(f"has targets of type {array.dtype} and shape {list(array.shape)}; task={task} takes numbers, "
                         "[n] or [n, numbers]")  # fmt: skip
    if task == MULTILABEL and not _binary(array):
        raise ValueError("has targets other than 0 and 1; task=multilabel takes 1 for each label that an input has")
    numbers = array.reshape(len(array), -1).astype(np.float32)
    if odd := int((~np.isfinite(numbers)).any(1).sum()):
        raise ValueError(f"has {odd} missing or infinite targets; fill them in, or leave these inputs out")
    return numbers


def strata(targets: Any, task: str) -> Labels:
    """Return the stratum of each example, int64 [n]. Splits and partitions take a share of each.

    Classes are strata. Regression targets have QUANTILES of the first number, multi-label targets their combinations of
    labels (the first label, if there are more than MOST_STRATA), next tokens have one stratum.
    """
    if task == CLASS:
        return targets
    if task == REGRESSION:
        edges = np.unique(np.quantile(targets[:, 0], np.arange(1, QUANTILES) / QUANTILES))
        return np.searchsorted(edges, targets[:, 0], side="right").astype(np.int64)
    if task == MULTILABEL:
        kinds, numbers = np.unique(targets, axis=0, return_inverse=True)
        return (numbers.reshape(-1) if len(kinds) <= MOST_STRATA else targets[:, 0]).astype(np.int64)
    return np.zeros(len(targets), np.int64)
