"""Check the results in a run's folder as they are read: files may be edited, damaged, or another program's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.run_folder.layout import METRICS, SUMMARY
from fedloom.server.run_folder.listing import read_metrics, read_summary

LARGEST = 1e300  # limit of a number; NaN passes, too
RECEIVED = "received"  # key of a round's record: bytes that reached the server, if sums arrived instead of replies
Check = Callable[[Any], bool]


def _number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and not abs(given) >= LARGEST


def _whole(given: Any) -> bool:
    return isinstance(given, int) and _number(given) and given >= 0


def _text(given: Any) -> bool:
    return isinstance(given, str)


def _table_of(inner: Check) -> Check:
    return lambda given: isinstance(given, Mapping) and all(map(inner, given.values()))


def _list_of(inner: Check) -> Check:
    return lambda given: isinstance(given, list) and all(map(inner, given))


def _or_none(inner: Check) -> Check:
    return lambda given: given is None or inner(given)


def _pair(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(map(_whole, given))


def _site(given: Any) -> bool:
    return isinstance(given, Mapping) and _text(given.get("name")) and _text(given.get("domain"))


KEYS = Mapping[str, tuple[str, Check]]  # by key, the expected type and its check
OF_SUMMARY: KEYS = {
    "accuracy": ("table of accuracies by network and domain", _or_none(_table_of(_table_of(_number)))),
    "aggregate": ("text", _text),
    "classes": ("table by site", _or_none(_table_of(lambda _: True))),
    "method": ("text", _text),
    "rounds": ("whole number", _whole),
    "seconds": ("number", _number),
    "resources": ("table of numbers", _or_none(_table_of(_number))),
    "sites": ("list of sites with name and domain", _or_none(_list_of(_site))),
    "unlearned": ("list of names", _or_none(_list_of(_text))),
}
OF_RECORD: KEYS = {
    "round": ("whole number", _whole),
    "accuracy": ("table of accuracies by domain", _or_none(_table_of(_or_none(_number)))),
    RECEIVED: ("whole number", _whole),
    "bytes": ("table of pairs of whole numbers by site", _or_none(_table_of(_pair))),
    "seconds": ("number", _or_none(_number)),
}


def checked_summary(path: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; empty if it cannot be read. Raises UserError for a key of another type."""
    found = read_summary(path)
    _check(found, OF_SUMMARY, f"{path}: {SUMMARY}")
    return found


def sound_summary(path: Path) -> dict[str, Any]:
    """Return the content of summary.json without keys of another type."""
    return {key: one for key, one in read_summary(path).items() if key not in OF_SUMMARY or OF_SUMMARY[key][1](one)}


def checked_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the records in metrics.jsonl by round, without torn lines. Raises UserError for a key of another type."""
    found = read_metrics(path)
    for round, record in found.items():
        _check(record, OF_RECORD, f"{path}: {METRICS}: round {round}")
    return found


def traffic_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of arrays in a round's record: sent to all sites, and received by the server."""
    each = (record.get("bytes") or {}).values()
    sent, received = (sum(one[place] for one in each) for place in (0, 1))
    return sent, record.get(RECEIVED, received)


def _check(found: Mapping[str, Any], keys: KEYS, where: str) -> None:
    for key, (what, holds) in keys.items():
        if key in found and not holds(found[key]):
            raise UserError(f"{where}: {key} must be a {what}")
