"""Which keys distinguish the rows of a comparison, and the names that they give to rows."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.suggestions import with_suggestion
from fedloom.conf.typed import UnknownKeyError
from fedloom.sims.comparison.entries import Entry
from fedloom.sims.comparison.options import naming_key
from fedloom.sims.sweeps.names import label_of

DESCRIPTIVE = ("strategy.name", "objective.name", "objective.mode", "network.name")  # the keys that name a row first
NAME = ".name"


def signature(entry: Entry, keys: Sequence[str]) -> str:
    """Return the values of the keys as one text. An option that the method does not have differs from every value."""
    return json.dumps([[entry.everything[key]] if key in entry.everything else [] for key in keys], sort_keys=True)


def distinct(entries: Sequence[Entry], keys: Sequence[str]) -> int:
    """Return the number of different signatures."""
    return len({signature(entry, keys) for entry in entries})


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """Return the keys of data and method with several values, the most descriptive first.

    An option that only some methods have counts if these differ in it; the methods' names distinguish the others.
    """
    keys = sorted(dict.fromkeys(key for entry in entries for key in entry.keys), key=_rank)
    return [key for key in keys if distinct([entry for entry in entries if key in entry.everything], [key]) > 1]


def _rank(key: str) -> int:
    """Return a key's rank among the most descriptive keys. All others share the last rank."""
    return DESCRIPTIVE.index(key) if key in DESCRIPTIVE else len(DESCRIPTIVE)


def shortest(entries: Sequence[Entry], keys: Sequence[str]) -> list[str]:
    """Return the keys that are enough to distinguish the entries, and to name the method of one that lacks an option."""
    left = list(keys)
    number = distinct(entries, left)
    for key in reversed(keys):
        fewer = [other for other in left if other != key]
        if distinct(entries, fewer) == number and not _nameless(entries, fewer):
            left = fewer
    return left


def _nameless(entries: Sequence[Entry], keys: Sequence[str]) -> set[str]:
    """Return the keys of names of methods that lack one of the `keys`, without those that other names imply."""
    lacking = {naming_key(entry.everything, key) for entry in entries for key in keys if key not in entry.everything}
    names = [key for key in keys if key.endswith(NAME)]
    number = distinct(entries, names)
    return {key for key in lacking if distinct(entries, [*names, key]) > number}


def checked_keys(entries: Sequence[Entry], by: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Return the keys of `--by`: `strategy` means `strategy.name`. Raises UserError for a key that no run has."""
    known = dict.fromkeys(key for entry in entries for key in entry.everything)
    keys = [key if key in known or f"{key}{NAME}" not in known else f"{key}{NAME}" for key in by]
    for key in keys:
        if key not in known:
            left_out = f"; note: {notes[0]}" if notes else ""
            raise UserError(f"--by: {with_suggestion(UnknownKeyError(key, [*known]))}{left_out}")
    return list(dict.fromkeys(keys))


class Naming:
    """The place of entries in rows by `keys`, and the rows' labels.

    An entry whose method lacks an option has the method's name in its place.
    """

    def __init__(self, entries: Sequence[Entry], keys: Sequence[str]) -> None:
        self.keys = list(keys)
        lacking = _nameless(entries, keys)
        self._every = [*keys, *sorted(lacking)]
        self._shown = lacking | set(keys)

    def parts(self, entry: Entry) -> dict[str, Any]:
        """Return the keys and values that decide about an entry's row and name it."""
        places = dict.fromkeys(key if key in entry.everything else naming_key(entry.everything, key) for key in self.keys)
        return {key: entry.value(key) for key in places if key in self._shown}

    def values(self, entry: Entry) -> dict[str, Any]:
        """Return an entry's values of the keys; None for an option that its method does not have."""
        return {key: entry.everything.get(key) for key in self.keys}

    def label(self, entry: Entry) -> str:
        """Return the label of an entry's row: `strategy=fedprox, mu=0.1`; empty without keys."""
        return label_of(self.parts(entry), self._every)


def numbered(labels: Sequence[str]) -> list[str]:
    """Return the labels with a number after each that appears several times, because long values are cut."""
    total, so_far, result = Counter(labels), Counter[str](), list[str]()
    for label in labels:
        so_far[label] += 1
        result.append(f"{label} #{so_far[label]}" if total[label] > 1 else label)
    return result


def texts(values: Mapping[str, Any]) -> str:
    """Return values as one text that is equal for equal values."""
    return json.dumps(values, sort_keys=True)
