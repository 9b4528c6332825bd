"""Group entries that differ only in the seed, or that have the same values of chosen keys."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.metrics import Facts
from fedloom.sims.comparison.entries import DATA, Entry
from fedloom.sims.report.spread import Spread, spread
from fedloom.sims.sweeps.names import label_of

DESCRIPTIVE = ("strategy.name", "objective.name", "objective.mode", "network.name")  # the keys that name a row first
MOST_NOTES = 10  # notes of the same kind
UNION = "union"


@dataclass(frozen=True)
class Group:
    """A row: one method's entries (runs and baselines) by seed. `values`: its values of the keys in which rows differ."""

    label: str
    values: Mapping[str, Any]
    seeds: Mapping[int, Sequence[Entry]]

    @property
    def entries(self) -> list[Entry]:
        """The entries of all seeds."""
        return [entry for each in self.seeds.values() for entry in each]

    def scores(self, domain: str = UNION) -> dict[int, float]:
        """Return the first metric on `domain` by seed: the mean over the entries that have one."""
        by_seed = {seed: [entry.accuracy[domain] for entry in entries if domain in entry.accuracy]
                   for seed, entries in self.seeds.items()}  # fmt: skip
        return {seed: sum(scores) / len(scores) for seed, scores in by_seed.items() if scores}

    @property
    def metric(self) -> Facts:
        """The first metric, the same in all groups."""
        return self.entries[0].metric

    @property
    def rounds(self) -> list[int]:
        """The rounds of the row's curve: those in which all entries with a curve were measured."""
        measured = [set(entry.curve) for entry in self.entries if entry.curve]
        return sorted(set.intersection(*measured)) if measured else []

    def cost(self, what: str) -> Spread:
        """Return the spread of a cost (a key of `Entry.cost`) over the entries that have it."""
        costs = [entry.cost[what] for entry in self.entries if not math.isnan(entry.cost[what])]
        return spread(costs or [math.nan])


def grouped(entries: Sequence[Entry], by: Sequence[str]) -> tuple[list[Group], list[str], list[str]]:
    """Group entries by the keys `by` (empty: all that differ, without the seed). Return groups, differing keys, notes.

    Raises UserError for a key in `by` that no configuration has.
    """
    kept, notes = _comparable(entries)
    kept, doubles = _without_repetition(kept)
    differing = _differing(kept)
    keys = _checked_keys(kept, by, notes) if by else _shortest(kept, differing)
    rows: dict[str, list[Entry]] = {}
    for entry in kept:
        rows.setdefault(_signature(entry, keys), []).append(entry)
    groups = [_group(row, keys) for row in rows.values()]
    mixed = [key for key in differing if any(len({_signature(entry, [key]) for entry in row}) > 1 for row in rows.values())]
    more = [*_data_notes(differing), *_mixed_notes(mixed), *_forgotten_notes(kept), *_apart_notes(groups)]
    return groups, differing, [*notes, *doubles, *more]


def _group(row: Sequence[Entry], keys: Sequence[str]) -> Group:
    values = {key: row[0].value(key) for key in keys}
    label = label_of(values) or str(row[0].summary.get("method", row[0].folder.name))
    seeds: dict[int, list[Entry]] = {}
    for entry in row:
        seeds.setdefault(entry.config.seed, []).append(entry)
    baseline = " (baseline)" if all(entry.baseline for entry in row) else ""
    return Group(label + baseline, values, dict(sorted(seeds.items())))


def _signature(entry: Entry, keys: Sequence[str]) -> str:
    return json.dumps([entry.value(key) for key in keys], sort_keys=True)


def _differing(entries: Sequence[Entry]) -> list[str]:
    """Return the keys of data and method that have several values, the most descriptive first."""
    keys = sorted(dict.fromkeys(key for entry in entries for key in entry.keys), key=_rank)
    return [key for key in keys if len({_signature(entry, [key]) for entry in entries}) > 1]


def _rank(key: str) -> int:
    """Return a key's rank among the most descriptive keys. All others share the last rank."""
    return DESCRIPTIVE.index(key) if key in DESCRIPTIVE else len(DESCRIPTIVE)


def _shortest(entries: Sequence[Entry], keys: Sequence[str]) -> list[str]:
    """Return the keys that are enough to distinguish the groups."""
    left = list(keys)
    number = len({_signature(entry, left) for entry in entries})
    for key in reversed(keys):
        fewer = [other for other in left if other != key]
        if len({_signature(entry, fewer) for entry in entries}) == number:
            left = fewer
    return left


def _checked_keys(entries: Sequence[Entry], by: Sequence[str], notes: Sequence[str]) -> list[str]:
    known = dict.fromkeys(key for entry in entries for key in entry.everything)
    for key in by:
        if key not in known:
            left_out = f"; note: {notes[0]}" if notes else ""
            raise UserError(f"--by: {unknown('key', key, known)}{left_out}")
    return list(by)


def _comparable(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries measured on the most frequent test examples, and a note for each other entry."""
    marks = [json.dumps(entry.tested_on) for entry in entries]
    most = Counter(marks).most_common(1)[0][0] if marks else ""
    usual = json.loads(most) if most else {}
    notes = []
    for entry, mark in zip(entries, marks, strict=True):
        own = json.loads(mark)
        odd = [key for key in dict.fromkeys([*own, *usual]) if own.get(key) != usual.get(key)]
        what = "first metric differs" if odd == ["evaluation.metrics"] else "test examples differ"
        if odd:
            notes.append(f"{entry.folder}: left out, because its {what} ({', '.join(odd)})")
    return [entry for entry, mark in zip(entries, marks, strict=True) if mark == most], _cut(notes)


def _without_repetition(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the first entry of each configuration and seed, and a note for each other entry."""
    kept: dict[str, Entry] = {}
    keys = list(dict.fromkeys(key for entry in entries for key in entry.keys))
    notes = []
    for entry in entries:
        first = kept.setdefault(f"{entry.config.seed} {_signature(entry, keys)}", entry)
        if first is not entry:
            here, other = (each.accuracy.get(UNION) for each in (entry, first))
            metric = entry.metric
            accuracies = f" ({metric.title}: {metric.text(here)} and {metric.text(other)})" if here != other else ""
            notes.append(f"{entry.folder}: left out, because {first.folder} has the same configuration and seed{accuracies}")
    return list(kept.values()), _cut(notes)


def _data_notes(differing: Sequence[str]) -> list[str]:
    odd = [key for key in differing if key.startswith(DATA)]
    return [f"The rows have different training data: {', '.join(odd)}"] if odd else []


def _mixed_notes(mixed: Sequence[str]) -> list[str]:
    return [f"Rows are means over runs that also differ in {', '.join(mixed)}"] if mixed else []


def _forgotten_notes(entries: Sequence[Entry]) -> list[str]:
    """Return a note for each run that has forgotten sites."""
    gone = {entry.folder: entry.summary.get("unlearned") or [] for entry in entries}
    return _cut([f"{folder}: this run has forgotten {', '.join(map(str, sites))}; its results are without "
                 f"{'it' if len(sites) == 1 else 'them'}" for folder, sites in gone.items() if sites])  # fmt: skip


def _apart_notes(groups: Sequence[Group]) -> list[str]:
    """Return a note for each row without a curve whose runs have curves."""
    return _cut([f"{group.label}: has no curve, because no round was measured in all its runs" for group in groups
                 if not group.rounds and any(entry.curve for entry in group.entries)])  # fmt: skip


def _cut(notes: list[str]) -> list[str]:
    rest = len(notes) - MOST_NOTES
    return notes if rest <= 0 else [*notes[:MOST_NOTES], f"... and {rest} more like these"]


def refuse_nothing(entries: Sequence[Entry], notes: Sequence[str]) -> None:
    """Raise UserError, with the first note, if `entries` is empty."""
    if not entries:
        raise UserError(f"compare: no finished run with test accuracies{f' ({notes[0]})' if notes else ''}")
