"""One question to many sites as messages: an order for each site, with its records."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, RecordDict

from fedloom.clients.data.standardise import STATISTICS
from fedloom.clients.protocol.messages import (
    BEFORE,
    CONFIG,
    ENROL,
    EXPECTED,
    ORDER,
    OWN,
    TRAIN,
    TaskInstructions,
    to_arrays,
)
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES, expected_record
from fedloom.clients.storage.states import staged_file, write_private_state
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.rounds.asking import Content
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import Restoration
from fedloom.server.rounds.server_state import ServerState

START = "start"  # marks what a site that enters a sum starts from: a file, or a record of its order


@dataclass(frozen=True)
class _Before:
    """Where a worker reads what a sum contains of a site, and how often it counts.

    `where`: a path or, with sums by node, a digest; `holder` is then the node that stores it, or `record` travels with the
    order.
    """

    where: str = ""
    holder: str = ""
    weight: int = 0
    record: ArrayRecord | None = None


@dataclass(frozen=True)
class Asking:
    """One question to sites.

    Attributes:
        kind: TRAIN, or the name of a question.
        number: The round's number in the run.
        site_round: The round's number for the sites (Schedule.site_round).
        split: The images to measure on: validation or test.
        trained: The sites that have trained in this round. Their own state is the one after training.
        attempt: The id of the attempt (secure aggregation).
        again: The number of the draw of the round's batches.
        restoration: The restoration to which the round belongs.
        fails: By site that fails, when (federation.dropout), as in TaskInstructions.
    """

    kind: str
    number: int
    site_round: int
    split: str = ""
    trained: Collection[str] = ()
    attempt: str = ""
    again: int = 0
    restoration: Restoration | None = None
    fails: Mapping[str, str] = field(default_factory=dict[str, str])


class Sender(Protocol):
    """What a message needs from its run (implemented by server.rounds.transport.RoundTransport).

    Attributes:
        config: The run's configuration.
        run: The run's id in the sites' stores.
        length: The number of rounds for the sites.
        digest: The digest of the configuration.
        text: The configuration as a record.
        state: The server's state.
    """

    config: Config
    run: str
    length: int
    digest: str
    text: ArrayRecord
    state: ServerState

    def needs_configuration(self, site: Site) -> bool:
        """Return whether the site's order must include the configuration."""
        ...

    def adds_up(self, expected: Mapping[str, RecordSpec], content: Content) -> bool:
        """Return whether workers add up these records of the replies to `content`."""
        ...


@dataclass
class TaskMessages:
    """Makes the messages of one question. Sites' common records are one object, which an engine sends once.

    Attributes:
        sender: The run's facts that orders contain.
        asking: The question.
        content: The records for all sites, or a function from a site to its records.
        expected: The records that a reply must have.
    """

    sender: Sender
    asking: Asking
    content: Content
    expected: Mapping[str, RecordSpec]
    _arrays: dict[int, tuple[State, ArrayRecord]] = field(default_factory=dict)  # by the state's identity
    _files: dict[int, tuple[State, Path]] = field(default_factory=dict)
    _common: dict[str, ArrayRecord] | None = None
    _first: tuple[str, ArrayRecord | None] = ("", None)  # the digest and record of the contribution that was sent last

    def __post_init__(self) -> None:
        config, slots = self.sender.config, self.sender.state.slots
        summed = bool(self.expected) and (bool(self.asking.attempt) or self.sender.adds_up(self.expected, self.content))
        reported = summed or bool(config.privacy.noise)
        self.slot = next((record for record, spec in self.expected.items() if spec.slot), "") if reported else ""
        weighted = {record for record, spec in self.expected.items() if spec.slot and slots.weighted(spec.slot)}
        counted = {record: SAMPLES if record in weighted else spec.mean or ONCE for record, spec in self.expected.items()}
        self.sums = counted if summed else {}
        self.staging = str(slots.contributions.staging.resolve()) if summed and not self.asking.attempt else ""
        self.members = len(slots.members)
        likes = {record: spec.like for record, spec in self.expected.items() if spec.like is not None}
        self.apart = bool(self.staging) and slots.ledger.blobs.elsewhere is not None
        self.likes = {EXPECTED: expected_record(likes)} if summed and not self.asking.attempt else {}

    def order(self, site: Site, lost: bool) -> RecordDict:
        """Return the site's order with all its records; `lost`: the site has lost its own state."""
        sender, asking = self.sender, self.asking
        own = sender.state.restart(site) if lost else None
        before = self._before(site) if self.slot and self.staging else _Before()
        order = TaskInstructions(
            config=sender.digest, run=sender.run, site=site.index, round=asking.site_round, rounds=sender.length,
            base=0 if lost and own is None else self._base(site), members=self.members, kind=asking.kind,
            split=asking.split, sums=self.sums, slot=self.slot, ledger=self.staging,
            before=before.where, holder=before.holder, weight=before.weight, secure=asking.attempt,
            again=asking.again, fails=asking.fails.get(site.name, ""),
        )  # fmt: skip
        if restoration := asking.restoration:
            order = replace(order, rounds=restoration.rounds, restoring=restoration.number, back=restoration.back)
        records: dict[str, Any] = {ORDER: order.record(), **self._records(site), **self.likes, **self._standardisation}
        if own is not None:
            records[OWN] = to_arrays(own)
        if before.record is not None:
            records[BEFORE] = before.record
        if sender.needs_configuration(site):
            records[CONFIG] = sender.text
        return RecordDict(records)

    @functools.cached_property
    def _standardisation(self) -> dict[str, ArrayRecord]:
        """Mean and deviation of the run's examples, for questions whose answers depend on the examples."""
        if self.asking.kind in (ENROL, STATISTICS):
            return {}
        return {name: to_arrays(state) for name, state in self.sender.state.features.records().items()}

    def _before(self, site: Site) -> "_Before":
        """Return where a worker reads what the sum contains of the site, or what the site starts from."""
        slots, blobs = self.sender.state.slots, self.sender.state.ledger.blobs
        expected, file = self.expected[self.slot], slots.contributions.file(site.name)
        if file is None:
            return self._entering(expected.first(site.name)) if expected.first else _Before()
        weight = slots.weight(expected.slot, site.name) if slots.has(expected.slot, site.name) else 0
        if not self.apart:
            return _Before(str(file.resolve()), weight=weight)
        holder = blobs.holder(file.stem)
        return _Before(file.stem, holder, weight, None if holder else self._sent_last(file.stem))

    def _entering(self, start: State) -> "_Before":
        """Return the same for a site that starts from this state; a shared state is written or sent once."""
        if self.apart:
            return _Before(START, record=self._shared(start))
        if id(start) not in self._files:
            staging = self.sender.state.slots.contributions.staging
            path = staged_file(staging / START, str(len(self._files)))
            write_private_state(path, start)
            self._files[id(start)] = start, path
        return _Before(str(self._files[id(start)][1].resolve()))

    def _sent_last(self, digest: str) -> ArrayRecord:
        """Return a contribution that the server stores, as one record for consecutive sites with the same one."""
        known, record = self._first
        if record is None or known != digest:
            record = to_arrays(self.sender.state.ledger.blobs.get(digest))
            self._first = digest, record
        return record

    def _base(self, site: Site) -> int:
        """Return the round after which the site's own state is valid, as the sites number it."""
        if self.asking.kind != TRAIN and site.name in self.asking.trained:
            return self.asking.site_round
        base = self.sender.state.slots.base(site.name)
        return self.sender.state.schedule.site_round(base) if base else 0

    def _records(self, site: Site) -> dict[str, ArrayRecord]:
        if not callable(self.content):
            if self._common is None:
                self._common = {name: to_arrays(state) for name, state in self.content.items()}
            return self._common
        return {name: self._shared(state) for name, state in self.content(site).items()}

    def _shared(self, state: State) -> ArrayRecord:
        """Return the record of a state; the same object if it was sent before."""
        if id(state) not in self._arrays:
            self._arrays[id(state)] = state, to_arrays(state)
        return self._arrays[id(state)][1]
