"""Each site's last contribution: the only part of a ledger that grows with the number of sites.

A round's contributions are written as they arrive. They become valid together, when the ledger commits the round. One file
holds everything that a site put into the method's slots. Floats are stored as floats: the summed integers follow from them.
"""

import shutil
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.storage.states import read_names, read_state, staged_file
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import dequantise, exact
from fedloom.fusion.flat import copy_of
from fedloom.fusion.state import State
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.tables import FLOATS
from fedloom.server.run_folder.layout import STAGING

MOST_BYTES = 64 * 2**20  # of contributions that are held in memory


class RecentStates:
    """The states that were written or read last, by digest: at most MOST_BYTES, and always the newest."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, State] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> State | None:
        """Return the state with this digest, which the caller must not change; None if it is not here."""
        if digest in self._states:
            self._states.move_to_end(digest)
        return self._states.get(digest)

    def add(self, digest: str, state: State) -> State:
        """Store a state in place of the oldest ones, and return it."""
        if digest not in self._states:
            self._states[digest] = state
            self._bytes += _bytes_of(state)
        while len(self._states) > 1 and self._bytes > MOST_BYTES:
            self._bytes -= _bytes_of(self._states.popitem(last=False)[1])
        return state


def _bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def prefixes(slots: Sequence[str]) -> dict[str, str]:
    """Return, by slot, what stands before its tensors' names in a contribution: nothing if there is only one slot."""
    return {slot: "" if len(slots) == 1 else f"{slot}/" for slot in slots}


@dataclass
class Contributions:
    """Reads and stages the contributions of a run.

    Attributes:
        ledger: The run's ledger.
        bits: One unit of an integer is 2**-bits.
        history: federation.history: "latest" or "all".
        slots: The names of the run's slots.
        latest: The last committed contribution of each site that is not forgotten.
    """

    ledger: Ledger
    bits: int
    history: str
    slots: Sequence[str]
    latest: dict[str, Contribution] = field(init=False)
    _staged: dict[str, Contribution] = field(default_factory=dict)
    _recent: RecentStates = field(default_factory=RecentStates)

    def __post_init__(self) -> None:
        self.latest = self.ledger.all_latest()
        self._integers = self.ledger.run().format < FLOATS

    @property
    def staging(self) -> Path:
        """The folder that workers write into (clients.storage.states.staged_file)."""
        return self.ledger.folder / STAGING

    def here(self, site: str) -> Contribution | None:
        """Return the site's contribution: the one that this round has staged, or the last committed one."""
        return self._staged.get(site) or self.latest.get(site)

    def has(self, site: str, slot: str) -> bool:
        """Return whether the site has put something into the slot."""
        contribution = self.here(site)
        if contribution is None or len(self.slots) == 1:
            return contribution is not None
        return any(
            name.startswith(prefixes(self.slots)[slot]) for name in read_names(self.ledger.blobs.path(contribution.blob))
        )

    def load(self, site: str, slot: str) -> State:
        """Return what the site put into the slot, as int64 in units of 2**-bits. Raises KeyError if it has put nothing."""
        return exact(self._part(self._whole(site), slot), self.bits)

    def floats(self, site: str, slot: str) -> State:
        """Return what the site put into the slot, as floats: a copy. Raises KeyError if it has put nothing."""
        part = self._part(self._whole(site), slot)
        integers = dequantise({name: tensor for name, tensor in part.items() if tensor.dtype == torch.int64}, self.bits)
        return copy_of({name: integers.get(name, tensor) for name, tensor in part.items()} if integers else part)

    def file(self, site: str) -> Path | None:
        """Return the path of the site's contribution, even if a node stores it; None if it has none."""
        contribution = self.here(site)
        return self.ledger.blobs.path(contribution.blob) if contribution else None

    def stage(self, site: str, round: int, parts: Mapping[str, State], samples: int) -> None:
        """Write what a site puts into slots (`parts`); it counts once the round is committed. Other slots are unchanged."""
        before = self._whole(site) if len(self.slots) > len(parts) and self.here(site) else {}
        merged = self._merged(before, parts)
        self._staged[site] = Contribution(self.ledger.blobs.put(merged), samples, round, self.bits)
        self._recent.add(self._staged[site].blob, copy_of(merged))

    def stage_all(self, sites: Iterable[str], round: int, parts: Mapping[str, State]) -> None:
        """Stage the same content for many sites, before any of them has put anything into these slots: one file for all."""
        groups: dict[Contribution | None, list[str]] = {}
        for site in sites:
            groups.setdefault(self.here(site), []).append(site)
        for contribution, names in groups.items():
            merged = self._merged(self.ledger.blobs.get(contribution.blob) if contribution else {}, parts)
            new = Contribution(self.ledger.blobs.put(merged), contribution.samples if contribution else 0, round, self.bits)
            self._staged |= dict.fromkeys(names, new)

    def blob_of(self, parts: Mapping[str, State]) -> str:
        """Write a contribution with these states by slot, without staging it, and return its digest."""
        return self.ledger.blobs.put(self._merged({}, parts))

    def check_written(self, sites: Iterable[str]) -> None:
        """Raise UserError, naming the file, unless workers have written these sites' contributions."""
        for path in (staged_file(self.staging, site) for site in sites):
            if not path.is_file():
                raise UserError(
                    f"{path}: was not written; federation.partial_sums needs workers that share the server's disk"
                )

    def stage_written(self, site: str, round: int, samples: int, blob: str) -> None:
        """Stage a contribution that a worker has written to the staging folder. Call `check_written` before."""
        path = staged_file(self.staging, site)
        if self._integers:
            self.stage(site, round, {self.slots[0]: read_state(path)}, samples)
        else:
            self._staged[site] = Contribution(self.ledger.blobs.adopt(path, blob), samples, round, self.bits)

    def stage_kept(self, site: str, round: int, samples: int, blob: str) -> None:
        """Stage a contribution that a node of the cluster stores (federation.node_store)."""
        self._staged[site] = Contribution(blob, samples, round, self.bits)

    def commit(self, round: int, states: Mapping[str, State], digest: Mapping[str, str], record: dict[str, Any]) -> None:
        """Commit the staged contributions and the server's states, by name, in one transaction."""
        blobs = {name: self.ledger.blobs.put(state) for name, state in states.items()}
        self.ledger.commit_round(round, self._staged, blobs, digest, record, self.history)
        self.latest.update(self._staged)
        self.abandon()

    def abandon(self) -> None:
        """Drop what is staged but not committed, and the workers' files. The next prune removes the blobs."""
        self._staged = {}
        shutil.rmtree(self.staging, ignore_errors=True)

    def _whole(self, site: str) -> State:
        contribution = self.here(site)
        if contribution is None:
            raise KeyError(f"{site} has contributed nothing")
        return self._recent.get(contribution.blob) or self._recent.add(
            contribution.blob, self.ledger.blobs.get(contribution.blob)
        )

    def _part(self, state: State, slot: str) -> State:
        if len(self.slots) == 1:
            return state
        start = prefixes(self.slots)[slot]
        part = {name[len(start) :]: tensor for name, tensor in state.items() if name.startswith(start)}
        if not part:
            raise KeyError(f"nothing was put into the slot '{slot}'")
        return part

    def _merged(self, before: State, parts: Mapping[str, State]) -> State:
        if len(self.slots) == 1 and not self._integers:
            return parts[self.slots[0]]
        start = prefixes(self.slots)
        replaced = tuple(start[slot] for slot in parts)
        unchanged = {name: tensor for name, tensor in before.items() if not name.startswith(replaced)}
        merged = unchanged | {start[slot] + name: tensor for slot, state in parts.items() for name, tensor in state.items()}
        return exact(merged, self.bits) if self._integers else merged
