"""Check the results in a run's folder as they are read: files may be edited, damaged, or another program's."""

import json
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.run_folder.layout import METRICS, SUMMARY
from fedloom.server.run_folder.listing import EMPTY, read_summary, text_of
from fedloom.server.run_folder.metrics_file import read_metrics

MAX_NUMBER = 1e300  # limit of a number; NaN passes, too
LOSS, VALIDATION = "loss", "validation"  # keys of a round's record: by site, its training loss, its validation metrics
RECEIVED = "received"  # key of a round's record: bytes that reached the server, if sums arrived instead of replies
Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) >= MAX_NUMBER


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _table_of(inner: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and all(map(inner, value.values()))


def _list_of(inner: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(inner, value))


def _or_none(inner: Check) -> Check:
    return lambda value: value is None or inner(value)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_whole, value))


def _site(value: Any) -> bool:
    return isinstance(value, Mapping) and _text(value.get("name")) and _text(value.get("domain"))


def _has_values(value: Any) -> bool:
    """Return whether each site of a table for one kind of network has the values of the first metric, if any."""
    numbers = _table_of(lambda entry: isinstance(entry, Mapping) and all(
        _or_none(_number)(entry.get(name)) for name in ("accuracy", "score")))  # fmt: skip
    return isinstance(value, Mapping) and _or_none(numbers)(value.get("sites"))


def _has_name(value: Any) -> bool:
    return isinstance(value, Mapping) and _text(value.get("name", ""))


def _has_round(value: Any) -> bool:
    return isinstance(value, Mapping) and _whole(value.get("round"))


KEYS = Mapping[str, tuple[str, Check]]  # by key, the expected type and its check
METRIC = ("table with the first metric's name", _or_none(_has_name))
OF_SUMMARY: KEYS = {
    "accuracy": ("table of accuracies by network and domain", _or_none(_table_of(_table_of(_number)))),
    "aggregate": ("text", _text),
    "scores": ("table of values by metric, network and domain", _or_none(_table_of(_table_of(_table_of(_number))))),
    "metric": METRIC,
    "best": ("table with the number of a round", _or_none(_has_round)),
    "stopped": ("table with the number of a round", _or_none(_has_round)),
    "classes": ("table by site", _or_none(_table_of(lambda _: True))),
    "method": ("text", _text),
    "rounds": ("whole number", _whole),
    "seconds": ("number", _number),
    "resources": ("table of numbers", _or_none(_table_of(_number))),
    "sites": ("list of sites with name and domain", _or_none(_list_of(_site))),
    "per_site": ("table by network, with a table of values by site", _or_none(_table_of(_has_values))),
    "unlearned": ("list of names", _or_none(_list_of(_text))),
}
OF_RECORD: KEYS = {
    "round": ("whole number", _whole),
    "accuracy": ("table of accuracies by domain", _or_none(_table_of(_or_none(_number)))),
    "scores": ("table of values by metric and domain", _or_none(_table_of(_table_of(_or_none(_number))))),
    "metric": METRIC,
    RECEIVED: ("whole number", _whole),
    "bytes": ("table of pairs of whole numbers by site", _or_none(_table_of(_pair))),
    "seconds": ("number", _or_none(_number)),
    "replies": ("whole number", _whole),
    "dropped": ("table of reasons by site", _or_none(_table_of(_text))),
    "train_loss": ("number", _or_none(_number)),
    LOSS: ("table of numbers by site", _table_of(_number)),
    VALIDATION: ("table of values by site and metric", _table_of(_table_of(_number))),
}


def checked_summary(path: Path) -> dict[str, Any]:
    """Return the content of summary.json; empty without one. Raises UserError for a damaged file or a wrong type."""
    if fault := summary_fault(path):
        raise UserError(fault)
    summary = read_summary(path)
    _check(summary, OF_SUMMARY, f"{path}: {SUMMARY}")
    return summary


def summary_fault(path: Path) -> str:
    """Return a line on a run's summary.json that cannot be read; empty for a sound one, or without one."""
    file = path / SUMMARY
    text, fault = text_of(file) if file.exists() else ("", "")
    if text and not fault:
        try:
            fault = "" if isinstance(json.loads(text), dict) else "is not a JSON object"
        except (ValueError, RecursionError):
            fault = "is not valid JSON"
    return f"{path}: {SUMMARY}: {fault}; `fedloom resume {path}` writes it again" if fault else ""


def sound_summary(path: Path) -> dict[str, Any]:
    """Return the content of summary.json without values of a wrong type."""
    return _sound(read_summary(path), OF_SUMMARY)


def checked_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the records in metrics.jsonl by round, without torn lines; empty without the file.

    Raises UserError for a file that has no record, and for a value of a wrong type.
    """
    text, fault = text_of(path / METRICS) if (path / METRICS).exists() else ("", "")
    records = read_metrics(path)
    if not records and (text.strip().partition("\n")[1] or fault not in {"", EMPTY}):  # a run's first line may be torn
        raise UserError(f"{path}: {METRICS}: {fault or 'has no record of a round'}; `fedloom resume {path}` writes it again")
    for round, record in records.items():
        _check(record, OF_RECORD, f"{path}: {METRICS}: round {round}")
    return records


def without_values(records: Iterable[dict[str, Any]], gone: Set[str]) -> list[dict[str, Any]]:
    """Return rounds' records; those with a site in `gone` lose the values of single sites.

    Its own would follow from the others' and the mean.
    """

    def stays(key: str, value: Any) -> bool:
        return key not in (LOSS, VALIDATION) or not (isinstance(value, Mapping) and gone & value.keys())

    return [{key: value for key, value in record.items() if stays(key, value)} for record in records]


def sound_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl by round, without torn lines, values of a wrong type, and those of no round."""
    records = (_sound(record, OF_RECORD) for record in read_metrics(path).values())
    return [record for record in records if "round" in record]


def traffic_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of arrays that the server sent and received in a round, from its record."""
    each = (record.get("bytes") or {}).values()
    sent, received = (sum(pair[index] for pair in each) for index in (0, 1))
    return sent, record.get(RECEIVED, received)


def seconds_of(records: Iterable[Mapping[str, Any]]) -> float:
    """Return the wall-clock seconds of all rounds in the records.

    Start-up before round 1, baselines and measurements after the last round do not count.
    """
    return sum(float(record.get("seconds") or 0.0) for record in records)


def _sound(content: Mapping[str, Any], keys: KEYS) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys or keys[key][1](value)}


def _check(content: Mapping[str, Any], keys: KEYS, where: str) -> None:
    for key, (kind, holds) in keys.items():
        if key in content and not holds(content[key]):
            raise UserError(f"{where}: {key} must be a {kind}")
