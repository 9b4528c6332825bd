"""What a run's folder says came out, checked as it is read: such files are edited, damaged, or another program's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.run_folder.layout import METRICS, SUMMARY
from fedloom.server.run_folder.listing import read_metrics, read_summary

LARGEST = 1e300  # of a number; NaN is one, too
RECEIVED = "received"  # of a round's record: bytes of arrays that came to the server, where sums did in the place of replies
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


KEYS = Mapping[str, tuple[str, Check]]  # what a key is, and whether it is that
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
    """What a run's summary.json holds; empty if there is nothing that can be read. UserError for a key of another type."""
    found = read_summary(path)
    _check(found, OF_SUMMARY, f"{path}: {SUMMARY}")
    return found


def sound_summary(path: Path) -> dict[str, Any]:
    """The same, without keys of another type."""
    return {key: one for key, one in read_summary(path).items() if key not in OF_SUMMARY or OF_SUMMARY[key][1](one)}


def checked_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The records in a run's metrics.jsonl by round, without lines that are torn. UserError for a key of another type."""
    found = read_metrics(path)
    for round, record in found.items():
        _check(record, OF_RECORD, f"{path}: {METRICS}: round {round}")
    return found


def traffic_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of arrays that a round's record tells of: to all sites, and what came to the server."""
    each = (record.get("bytes") or {}).values()
    sent, received = (sum(one[place] for one in each) for place in (0, 1))
    return sent, record.get(RECEIVED, received)


def _check(found: Mapping[str, Any], keys: KEYS, where: str) -> None:
    for key, (what, holds) in keys.items():
        if key in found and not holds(found[key]):
            raise UserError(f"{where}: {key} is no {what}")
