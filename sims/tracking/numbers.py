"""The numbers of a round's record, and the settings of a configuration, by names that trackers take."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from fedloom.conf.schema import Config
from fedloom.server.run_folder.results_schema import RECEIVED, traffic_of

_ODD = re.compile(r"[^A-Za-z0-9_.\- ]")
TRAFFIC = ("sent", "received")


def round_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What a round's record says of all sites together: `train_loss`, `validation/union`, `bytes/sent`, `dropped`, ..."""
    known = {"round", "accuracy", "dropped", "bytes", RECEIVED, "epsilon", "clipped"}
    found = dict(_flat("", {key: item for key, item in record.items() if key not in known}))
    found |= dict(_flat("validation", record.get("accuracy") or {}))
    for key in ("dropped", "clipped"):
        if key in record:
            found[key] = float(len(record[key] or {}))
    if record.get("bytes"):
        found |= {f"bytes/{name}": float(each) for name, each in zip(TRAFFIC, traffic_of(record), strict=True)}
    if spent := (record.get("epsilon") or {}).values():
        found["epsilon"] = float(max(spent))
    return found


def site_numbers(record: Mapping[str, Any], sites: Set[str]) -> dict[str, dict[str, float]]:
    """The same of each of these sites that took part: `sent`, `received`, `dropped` (0 or 1), `epsilon`, ..."""
    found: dict[str, dict[str, float]] = {}
    traffic, dropped = record.get("bytes") or {}, record.get("dropped") or {}
    for site in sites & (traffic.keys() | dropped.keys()):
        found[site] = {"dropped": float(site in dropped)}
        found[site] |= dict(zip(TRAFFIC, map(float, traffic.get(site, ())), strict=False))
    for key, item in record.items():
        if key in ("bytes", "dropped") or not isinstance(item, Mapping):
            continue
        for site in sites & item.keys():
            found.setdefault(site, {}).update(_flat(key, item[site]))
    return dict(sorted(found.items()))


def settings(config: Config) -> dict[str, str]:
    """Every key of a configuration as a text, dotted; lists as JSON. Where it is kept and what tracks it are none of it."""
    tree = {key: item for key, item in dataclasses.asdict(config).items() if key not in ("run", "tracking")}
    return dict(_texts("", tree))


def safe(name: str) -> str:
    """A name without what a tracker would not take, or would take for a place elsewhere: letters, digits, _ . - and /."""
    parts = [_ODD.sub("_", part).strip() for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)


def one(name: object) -> str:
    """A name as a single part of a longer one."""
    return str(name).replace("/", "_")


def _flat(name: str, item: Any) -> Iterator[tuple[str, float]]:
    """All finite numbers in nested sections, each by the names that lead to it."""
    if isinstance(item, Mapping):
        for key, inner in item.items():
            yield from _flat("/".join(filter(None, [name, one(key)])), inner)
    elif isinstance(item, int | float) and math.isfinite(item):
        yield name, float(item)


def _texts(name: str, item: Any) -> Iterator[tuple[str, str]]:
    if isinstance(item, Mapping):
        for key, inner in item.items():
            yield from _texts(".".join(filter(None, [name, str(key)])), inner)
    else:
        yield name, json.dumps(item, default=str) if isinstance(item, list) else str(item)
