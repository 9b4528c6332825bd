"""What a method sees of its slots: all of them, without some sites, or for some sites only."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.networks import Architecture, Model
from fedloom.clients.networks.initial import SHARED, initial_state
from fedloom.clients.objectives import Experiment
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, dequantise
from fedloom.fusion.flat import copy_of
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.membership import check_members, rounds_with
from fedloom.server.ledger.slots import Slots


class Models(Mapping[str, Model]):
    """Models by name, each made on access. The first one is the aggregate, unless it has a site's name."""

    def __init__(self, makers: Mapping[str, Callable[[], Model]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Model:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Setup:
    """What a run starts from: the experiment with its configuration, all sites, and the ledger (None: new in `folder`).

    `evaluator`: measures models on validation examples; None: a new one when needed.
    """

    experiment: Experiment
    sites: list[Site]
    folder: Path
    ledger: Ledger | None = None
    evaluator: Evaluator | None = None

    @property
    def config(self) -> Config:
        """The experiment's configuration."""
        return self.experiment.config

    def measuring(self) -> Evaluator:
        """Return `evaluator`, or a new one if it is None."""
        return self.evaluator or Evaluator(self.config)


class View:
    """A read-only view of a run's slots. In a round, it includes what the round has put and stored so far.

    `names`: the sites in it; None: all members. `totals`: sums that replace the stored ones.
    """

    def __init__(
        self, setup: Setup, slots: Slots, names: Sequence[str] | None = None, totals: Mapping[str, ExactSum] | None = None
    ) -> None:
        self.setup, self.experiment, self.config, self.slots = setup, setup.experiment, setup.config, slots
        self._names, self._totals = None if names is None else frozenset(names), totals or {}

    @property
    def sites(self) -> list[Site]:
        """The members that this view includes."""
        return [site for site in self.slots.members if self._names is None or site.name in self._names]

    @property
    def whole(self) -> bool:
        """Whether this view includes all members."""
        return self._names is None or len(self.sites) == len(self.slots.members)

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator, which measures models on the server's validation examples."""
        return self.setup.measuring()

    @property
    def ledger(self) -> Ledger:
        """The run's ledger."""
        return self.slots.ledger

    @property
    def bits(self) -> int:
        """The exponent of the unit: sums count in units of 2**-bits."""
        return self.slots.bits

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        last = self.ledger.last_round()
        return last.round if last else 0

    def without(self, names: Sequence[str]) -> "View":
        """Return the view as if these sites had never put anything. Raises UserError for an unknown or repeated name."""
        check_members(self.slots.members, names)
        removed = set(names)
        return View(self.setup, self.slots, [site.name for site in self.sites if site.name not in removed])

    def subset(self, names: Sequence[str]) -> "View":
        """Return a view that includes these sites only. Raises UserError for an unknown or repeated name."""
        check_members(self.slots.members, names)
        return View(self.setup, self.slots, list(names))

    def with_totals(self, totals: Mapping[str, ExactSum]) -> "View":
        """Return this view with these sums, by slot, instead of the stored ones."""
        return View(self.setup, self.slots, None if self._names is None else list(self._names), totals)

    def total(self, slot: str) -> ExactSum:
        """Return the exact sum of a slot over the view's sites; the caller must not change it."""
        if slot in self._totals:
            return self._totals[slot]
        if self.whole:
            return self.slots.total(slot)
        names = [site.name for site in self.sites]
        others = [site.name for site in self.slots.members if self._names is not None and site.name not in self._names]
        fewer = len(others) < len(names)  # reads the smaller group of sites
        return self.slots.sum_without(slot, others) if fewer else self.slots.sum_of(slot, names)

    def sum(self, slot: str) -> State:
        """Return the sum of a slot over the view's sites, float32."""
        return self.total(slot).total()

    def mean(self, slot: str) -> State:
        """Return the mean of a slot over the view's sites, float32. Raises ExactSumError if no site has put anything."""
        return self.total(slot).mean()

    def has(self, slot: str, site: str) -> bool:
        """Return whether a site has put something into a slot."""
        return self.slots.has(slot, site)

    def last_put(self, site: str) -> int:
        """Return the round in which a site last put something; 0 if it has put nothing."""
        contribution = self.slots.contributions.here(site)
        return contribution.round if contribution else 0

    def integers(self, slot: str, site: str) -> State:
        """Return what a site last put into a slot, as int64 in units of 2**-bits. Raises KeyError if it has put nothing."""
        if not self.has(slot, site):
            raise KeyError(f"slot '{slot}': {site} has put nothing into it yet; check has('{slot}', '{site}') first")
        return copy_of(self.slots.contribution(slot, site))

    def contribution(self, slot: str, site: str) -> State:
        """Return what a site last put into a slot, float32. Raises KeyError if it has put nothing."""
        return dequantise(self.integers(slot, site), self.bits)

    def last_samples(self, site: str) -> int:
        """Return how many images a site trained on when it last put something; 0 if it has put nothing."""
        contribution = self.slots.contributions.here(site)
        return contribution.samples if contribution else 0

    def server_state(self, name: str) -> State:
        """Return a copy of the server's state of this name. Raises KeyError if it does not exist."""
        saved = self.slots.keeps()
        if name not in saved:
            raise KeyError(f"no server state '{name}' (saved: {', '.join(sorted(saved)) or 'none'})")
        return own(saved[name])

    def rounds_with(self, names: Sequence[str]) -> int:
        """Return over how many rounds forgotten sites may have left traces. Without names: the number of rounds."""
        return rounds_with(self.ledger, names)

    def architecture(self, site: Site | None = None) -> Architecture:
        """Return a site's architecture, or (None) the configuration's."""
        return self.experiment.architecture(site)

    def initial(self, who: str = SHARED, site: Site | None = None, exact: bool = False) -> State:
        """Return the initial state that the seed draws for `who`, for a site's architecture or the configuration's.

        `exact`: frozen tensors are not rounded to the unit of the sums.
        """
        shared = who == SHARED and site is None and not exact
        return own(_theta(self.experiment)) if shared else initial_state(self.config, who, site, exact)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Add an event to the ledger; do nothing if it is open only for reading."""
        if self.ledger.writable:
            self.ledger.note(kind, dict(body))


def own(state: State) -> State:
    """Return a copy of a state, whose tensors the caller may change in place."""
    return copy_of(state)


@functools.lru_cache(maxsize=4)
def _theta(experiment: Experiment) -> State:
    """Return theta_0, drawn once."""
    return initial_state(experiment.config)
