"""Group entries that differ only in the seed, or that have the same values of chosen keys."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.conf.metrics import Facts
from fedloom.sims.comparison.entries import DATA, Entry, notes_on
from fedloom.sims.comparison.keys import Naming, checked_keys, differing_keys, distinct, numbered, shortest, signature, texts
from fedloom.sims.report.spread import Spread, spread

MOST_NOTES = 10  # notes of the same kind
UNION = "union"


@dataclass(frozen=True)
class Group:
    """A row: one method's entries (runs and baselines) by seed. `values`: its values of the keys in which rows differ."""

    label: str
    values: Mapping[str, Any]
    seeds: Mapping[int, Sequence[Entry]]

    def __repr__(self) -> str:
        return f"Group({self.label}: {count(len(self.entries), 'run')})"

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

    A key may be a section with a name: `strategy` is `strategy.name`. Raises UserError for a key that no configuration has.
    """
    kept, notes = _comparable(entries)
    kept, doubles = _without_repetition(kept)
    differing = differing_keys(kept)
    naming = Naming(kept, checked_keys(kept, by, notes) if by else shortest(kept, differing))
    rows: dict[str, list[Entry]] = {}
    for entry in kept:
        rows.setdefault(texts(naming.parts(entry)), []).append(entry)
    labels = numbered([_label(row, naming) for row in rows.values()])
    groups = [_group(row, label, naming) for row, label in zip(rows.values(), labels, strict=True)]
    mixed = [key for key in differing if any(distinct(row, [key]) > 1 for row in rows.values())]
    more = [*_data_notes(differing), *_mixed_notes(mixed), *_forgotten_notes(kept), *_apart_notes(groups)]
    return groups, differing, [*notes, *doubles, *notes_on(kept), *more]


def _label(row: Sequence[Entry], naming: Naming) -> str:
    label = naming.label(row[0]) or str(row[0].summary.get("method", row[0].folder.name))
    return label + (" (baseline)" if all(entry.baseline for entry in row) else "")


def _group(row: Sequence[Entry], label: str, naming: Naming) -> Group:
    seeds: dict[int, list[Entry]] = {}
    for entry in row:
        seeds.setdefault(entry.config.seed, []).append(entry)
    return Group(label, naming.values(row[0]), dict(sorted(seeds.items())))


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
    """Return the most complete entry of each configuration and seed, in order, and a note for each other entry."""
    equal: dict[str, list[Entry]] = {}
    keys = list(dict.fromkeys(key for entry in entries for key in entry.keys))
    for entry in entries:
        equal.setdefault(f"{entry.config.seed} {signature(entry, keys)}", []).append(entry)
    best = [max(each, key=_completeness) for each in equal.values()]  # the first of several
    notes = [_repeated(entry, one) for one, each in zip(best, equal.values(), strict=True) for entry in each
             if entry is not one]  # fmt: skip
    return best, _cut(notes)


def _completeness(entry: Entry) -> tuple[bool, int, int]:
    """Return a larger value for a run that forgot no site, has more rounds in its metrics, or more test values."""
    return not entry.summary.get("unlearned"), len(entry.metrics), len(entry.accuracy)


def _repeated(entry: Entry, other: Entry) -> str:
    here, there = (each.accuracy.get(UNION) for each in (entry, other))
    metric = entry.metric
    accuracies = f" ({metric.title}: {metric.text(here)} and {metric.text(there)})" if here != there else ""
    more = " and is more complete" if _completeness(other) > _completeness(entry) else ""
    return f"{entry.folder}: left out, because {other.folder} has the same configuration and seed{more}{accuracies}"


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
