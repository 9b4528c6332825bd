"""What the desk shows of one run: its rounds, sites, certificates and events."""

import itertools
import math
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain
from fedloom.conf.metrics import Facts
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import chain
from fedloom.server.ledger.database import LEDGER
from fedloom.server.run_folder.folder import is_file_name
from fedloom.server.run_folder.layout import CERTIFICATES
from fedloom.server.run_folder.results_schema import sound_metrics, sound_summary, traffic_of
from fedloom.server.run_folder.scores import headline, metric_of, spot
from fedloom.server.unlearning.certificate import as_written, read
from fedloom.server.unlearning.signing import SUFFIX
from fedloom.server.unlearning.verification import held
from fedloom.sims.desk.runs import MissingError
from fedloom.sims.operations.ledger import short
from fedloom.sims.report.results import homes, titled

RECENT = 5  # rounds whose mean duration predicts the time left
Curve = list[tuple[int, float]]  # (round, value)


@dataclass(frozen=True)
class Training:
    """The committed rounds of a run.

    Attributes:
        metric: The first metric.
        scores: Its validation values by domain.
        loss: The training loss.
        dropped: (round, site, reason), the newest first.
        asked: Sites that exchanged messages in the last round.
        sent: Bytes to the sites.
        received: Bytes from the sites.
        replies: All replies that counted.
        seconds: The duration of all rounds.
        pace: Seconds of a recent round.
        sites: (rounds, bytes sent, bytes received) by site.
    """

    metric: Facts
    scores: dict[str, Curve]
    loss: Curve
    dropped: list[tuple[int, str, str]]
    asked: list[str]
    sent: int
    received: int
    replies: int
    seconds: float
    pace: float
    sites: dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Site:
    """A site of a run, without its data. `score`: the first metric on its own test examples, as text."""

    name: str
    title: str
    domain: str
    forgotten: bool
    rounds: int
    sent: int
    received: int
    dropped: int
    samples: int | None
    score: str


@dataclass(frozen=True)
class SiteRecord:
    """What only the page of a site shows: its node and key, what is stored of it, its dropped replies."""

    site: Site
    node: int | None
    key: str
    held: list[str]
    history: list[tuple[int, int, str]]
    dropped: list[tuple[int, str]]


@dataclass(frozen=True)
class Certificate:
    """A certificate in a run's folder. `unchanged`: it is as the server wrote it, by the ledger."""

    request: str
    sites: list[str]
    by: str
    times: dict[str, str]
    signed: bool
    unchanged: bool


@dataclass(frozen=True)
class Event:
    """An event of the ledger. `what`: the short parts of its body."""

    id: int
    time: str
    kind: str
    what: str
    digest: str


@dataclass(frozen=True)
class Chain:
    """The state of the ledger's chain. `problem`: the first fault; empty if the chain is whole."""

    events: int
    digest: str
    problem: str


def training_of(path: Path) -> Training:
    """Return the rounds of a run."""
    records = sound_metrics(path)
    sites: dict[str, tuple[int, int, int]] = {}
    for record in records:
        for site, (down, up) in (record.get("bytes") or {}).items():
            rounds, sent, received = sites.get(site, (0, 0, 0))
            sites[site] = rounds + 1, sent + down, received + up
    dropped = [(one["round"], site, why) for one in records for site, why in (one.get("dropped") or {}).items()]
    seconds = [value for _, value in _curve(records, lambda record: record.get("seconds"))]
    names = dict.fromkeys(name for record in records for name in headline(record))
    return Training(
        metric=metric_of(sound_summary(path), records),
        scores={name: _curve(records, lambda record, name=name: headline(record).get(name)) for name in names},
        loss=_curve(records, lambda record: record.get("train_loss")),
        dropped=dropped[::-1],
        asked=list(records[-1].get("bytes") or {}) if records else [],
        sent=sum(traffic_of(record)[0] for record in records),
        received=sum(traffic_of(record)[1] for record in records),
        replies=sum(record.get("replies", 0) for record in records),
        seconds=sum(seconds),
        pace=sum(seconds[-RECENT:]) / max(1, len(seconds[-RECENT:])),
        sites=sites,
    )


def _curve(records: Sequence[Mapping[str, Any]], value_of: Callable[[Mapping[str, Any]], float | None]) -> Curve:
    points = [(record["round"], value_of(record)) for record in records]
    return [(round, value) for round, value in points if value is not None and math.isfinite(value)]


def sites_of(path: Path) -> list[Site]:
    """Return the sites of a run, in the ledger's order."""
    summary, training = sound_summary(path), training_of(path)
    titles, domains, scores = titled(summary), homes(summary), _scores(summary)
    lost: dict[str, int] = {}
    for _, name, _ in training.dropped:
        lost[name] = lost.get(name, 0) + 1
    with Ledger.open(path, server=False) as ledger:
        latest = ledger.all_latest()
        return [
            Site(
                name, titles.get(name, name), domains.get(name, ""), forgotten, *training.sites.get(name, (0, 0, 0)),
                lost.get(name, 0), latest[name].samples if name in latest else None, training.metric.text(scores.get(name)),
            )
            for name, forgotten in ledger.sites().items()
        ]  # fmt: skip


def _scores(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the first metric of each site's network on its own test examples."""
    by_role = summary.get("per_site") or {}
    result = by_role.get("aggregate") or by_role.get("own") or {}
    return {name: spot(entry) for name, entry in (result.get("sites") or {}).items()}


def site_of(path: Path, name: str) -> SiteRecord:
    """Return one site. Raises MissingError if the run has no such site."""
    site = next((one for one in sites_of(path) if one.name == name), None)
    if site is None:
        raise MissingError("This site does not exist.")
    dropped = [(round, why) for round, lost, why in training_of(path).dropped if lost == name]
    with Ledger.open(path, server=False) as ledger:
        history = [(one.round, one.samples, one.blob) for one in ledger.history(name)]
        return SiteRecord(site, ledger.bound().get(name), ledger.keys().get(name, ""), held(ledger, name), history, dropped)


def certificates_of(path: Path) -> list[Certificate]:
    """Return the readable certificates of a run, oldest first."""
    found = []
    with Ledger.open(path, server=False) as ledger:
        for request in (one for one in ledger.requests() if one.state in ("applied", "verified")):
            with suppress(UserError):
                file = certificate_file(path, request.id)
                content = read(file)
                signed, unchanged = file.with_suffix(SUFFIX).is_file(), as_written(file, request.id, ledger)
                found.append(Certificate(request.id, content["sites"], request.by, content["times"], signed, unchanged))
    return found


def certificate_file(path: Path, request: str) -> Path:
    """Return the path of a certificate, for a request that the ledger has.

    Raises MissingError for an id that is not a file's name, and for a file outside the run's folder: runs may be copies.
    """
    file = path / CERTIFICATES / f"{request}.json"
    if not is_file_name(request) or not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(path)):
        raise MissingError("This certificate does not exist.")
    return file


def events_of(path: Path, before: int, most: int) -> list[Event]:
    """Return up to `most` events with ids below `before` (0: the newest), the newest first."""
    with Ledger.open(path, server=False) as ledger:
        newest = ledger.newest()
        end = min(before, newest.id + 1) if newest and before > 0 else newest.id + 1 if newest else 1
        listed = itertools.islice(ledger.events(after=max(0, end - most - 1)), min(most, end - 1))
        return [Event(one.id, one.time, plain(one.kind), plain(short(one.body)), one.digest) for one in listed][::-1]


def chain_of(path: Path) -> Chain:
    """Check that the ledger's events follow each other. `fedloom ledger RUN --check` also checks all files."""
    try:
        found = next(chain(path), None)
        with Ledger.open(path, server=False) as ledger:
            newest = ledger.newest()
    except (UserError, sqlite3.Error, ValueError) as error:
        return Chain(0, "", f"{LEDGER}: {error}")
    return Chain(newest.id if newest else 0, newest.digest if newest else "", f"{found.file}: {found.what}" if found else "")
