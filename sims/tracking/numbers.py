"""Convert a round's record and a configuration to numbers and settings with names that trackers accept."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from fedloom.conf.metrics import ACCURACY
from fedloom.conf.schema import Config
from fedloom.server.run_folder.results_schema import LOSS, RECEIVED, VALIDATION, traffic_of
from fedloom.server.run_folder.scores import SCORES, headline

_ODD = re.compile(r"[^A-Za-z0-9_.\- ]")
TRAFFIC = ("sent", "received")


def round_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a round's numbers for all sites together: `train_loss`, `validation/union`, `bytes/sent`, `dropped`, ..."""
    known = {"round", ACCURACY, SCORES, "dropped", "bytes", RECEIVED, "epsilon", "clipped", LOSS, VALIDATION}
    numbers = dict(_flat("", {key: item for key, item in record.items() if key not in known}))
    numbers |= dict(_flat("validation", headline(record)))
    others = {name: values for name, values in (record.get(SCORES) or {}).items() if values is not headline(record)}
    numbers |= dict(_flat("validation", others))
    for key in ("dropped", "clipped"):
        if key in record:
            numbers[key] = float(len(record[key] or {}))
    if record.get("bytes"):
        numbers |= {f"bytes/{name}": float(each) for name, each in zip(TRAFFIC, traffic_of(record), strict=True)}
    if spent := (record.get("epsilon") or {}).values():
        numbers["epsilon"] = float(max(spent))
    return numbers


def site_numbers(record: Mapping[str, Any], sites: Set[str]) -> dict[str, dict[str, float]]:
    """Return by site the numbers of those `sites` in the round: `sent`, `received`, `dropped` (0 or 1), `loss`,
    `validation/accuracy`, `epsilon`, ..."""
    by_site: dict[str, dict[str, float]] = {}
    traffic, dropped = record.get("bytes") or {}, record.get("dropped") or {}
    for site in sites & (traffic.keys() | dropped.keys()):
        by_site[site] = {"dropped": float(site in dropped)}
        by_site[site] |= dict(zip(TRAFFIC, map(float, traffic.get(site, ())), strict=False))
    for key, item in record.items():
        if key in ("bytes", "dropped") or not isinstance(item, Mapping):
            continue
        for site in sites & item.keys():
            by_site.setdefault(site, {}).update(_flat(key, item[site]))
    return dict(sorted(by_site.items()))


def all_numbers(record: Mapping[str, Any], sites: Set[str]) -> dict[str, float]:
    """Return a round's `round_numbers` and the `site_numbers` of these sites, as `site NAME/sent`, ..."""
    of_sites = {f"site {site}/{name}": number for site, numbers in site_numbers(record, sites).items()
                for name, number in numbers.items()}  # fmt: skip
    return round_numbers(record) | of_sites


def settings(config: Config) -> dict[str, str]:
    """Return the configuration as dotted keys and texts, lists as JSON, without the sections `run` and `tracking`."""
    tree = {key: item for key, item in dataclasses.asdict(config).items() if key not in ("run", "tracking")}
    return dict(_texts("", tree))


def safe(name: str) -> str:
    """Return a name with only letters, digits, spaces, _ . - and /, without parts such as `..` that lead elsewhere."""
    parts = [_ODD.sub("_", part).strip() for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)


def one(name: object) -> str:
    """Return a name as a single part of a longer name: `/` becomes `_`."""
    return str(name).replace("/", "_")


def _flat(name: str, item: Any) -> Iterator[tuple[str, float]]:
    """Yield all finite numbers in nested sections, each with its path."""
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
