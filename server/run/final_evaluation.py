"""Measure a method's networks at the end of a run: on every domain, and at single sites on their own test images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.clients.data import class_counts
from fedloom.clients.data.listing import held
from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.networks import Architecture, Model, architecture_of
from fedloom.clients.protocol.reply_checks import MOST_NAME
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.schedules import looked_at
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Models, View
from fedloom.server.run_folder.folder import AGGREGATE, RunFolder, is_file_name

QUESTION_BYTES = 64 * 2**20  # approximate limit of the networks in one question to sites
OWN = "own"  # key of results by site: the sites' own networks, each at its site
MOST_COUNTED = 1000  # sites whose images are counted by class, at most


@dataclass(frozen=True)
class Found:
    """The scores of a network: `shares`, accuracy by domain and on the union; `sites`, scores on each site's own test
    images.
    """

    shares: dict[str, float]
    sites: dict[str, Score]


Scoring = Callable[[Sequence[Model | None], Sequence[Sequence[Site]]], list[Found]]


@dataclass
class _Waiting:
    """A network to measure: the table and name for its accuracy, the sites that use it, and its role."""

    into: dict[str, dict[str, float]]
    name: str
    model: Model | None
    users: Sequence[Site] = ()
    role: str = OWN


class Measured:
    """Measures a method's networks one by one, and writes each into the run's folder.

    If sites measure, one question has several networks. `scores`: returns models' scores at their users
    (TrainingRun.scores). `sites`: the sites that are evaluated one by one.
    """

    def __init__(self, state: ServerState, folder: RunFolder, evaluator: Evaluator, scores: Scoring) -> None:
        self.state, self.folder, self.evaluator, self._scores = state, folder, evaluator, scores
        self.config, self.aggregate = state.config, state.display_name
        self.models = check_models(self.config, state.models())
        self.accuracy: dict[str, dict[str, float]] = {}
        self.forgotten: dict[str, dict[str, float]] = {}
        self.facts: dict[str, Any] = {}
        self.at: dict[str, dict[str, Score]] = {}
        view = state.view()
        there = set(looked_at(self.config, trained(view)))
        self.sites = [site for site in view.sites if site.name in there]
        self._waiting: list[_Waiting] = []
        self._served: set[Architecture] = set()  # architectures whose first shared network has been measured

    def network(self, name: str) -> None:
        """Write and measure the network of this display name."""
        model = self.evaluator.settled(self.models[name])
        self.folder.write_network(AGGREGATE if name == self.aggregate else name, model, display_name=name)
        own = [site for site in self.sites if site.name == name]
        self.measure(self.accuracy, name, model, own or self._users(model.architecture), OWN if own else AGGREGATE)
        self.facts |= model.facts

    def site(self, site: Site) -> None:
        """Measure a site's own network, and the aggregate without it, if the site is one of `sites`."""
        if site not in self.sites:
            return
        if site.name in self.models:
            self.network(site.name)
        if (rest := self.state.without([site.name])) is not None:
            self.measure(self.forgotten, site.name, rest)

    def measure(
        self, into: dict[str, dict[str, float]], name: str, model: Model | None, users: Sequence[Site] = (), role: str = OWN
    ) -> None:
        """Measure a model, now or together with others (`settle`), and put its accuracy into a table under a name."""
        self._waiting.append(_Waiting(into, name, model, users, role))
        size = sum(tensor.nbytes for one in self._waiting if one.model is not None for tensor in one.model.state.values())
        if self.config.evaluation.where == "server" or size > QUESTION_BYTES:
            self.settle()

    def settle(self) -> None:
        """Measure the waiting models."""
        waiting, self._waiting = self._waiting, []
        found = self._scores([one.model for one in waiting], [one.users for one in waiting]) if waiting else []
        for one, here in zip(waiting, found, strict=True):
            one.into[one.name] = here.shares
            self.at.setdefault(one.role, {}).update({name: each for name, each in here.sites.items() if each.images})

    def per_site(self) -> dict[str, Any]:
        """Return the scores at the sites, by role of the networks (aggregate, own), for the summary."""
        return {role: told(scores) for role in (AGGREGATE, OWN) if (scores := self.at.get(role))}

    def _users(self, architecture: Architecture) -> list[Site]:
        """Return the sites that would use a shared network: those of its architecture, for the first such network only."""
        if architecture in self._served:
            return []
        self._served.add(architecture)
        return [site for site in self.sites if architecture_of(self.config, site) == architecture]


def trained(view: View) -> list[str]:
    """Return the members that have trained, according to the ledger; if it names none, all members."""
    there: set[str] = {site.name for site in view.sites if view.last_put(site.name)}
    for row in view.ledger.rounds():
        record = row.record or {}
        if row.round and not record.get("recalibrated"):
            there |= set(record.get("bytes") or {}) - set(record.get("dropped") or {})
    names = [site.name for site in view.sites]
    return [name for name in names if name in there] or names


def told(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return scores at sites for the summary: each score, their spread over sites, and totals by class.

    Every site has the same weight in the spread.
    """
    shares = {name: one.right / one.images for name, one in scores.items()}
    worst, best = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    values, classes = np.array(list(shares.values())), dict[int, tuple[int, int]]()
    for one in scores.values():
        for name, (right, images) in one.classes.items():
            before = classes.get(name, (0, 0))
            classes[name] = before[0] + right, before[1] + images
    return {
        "mean": float(values.mean()),
        "deviation": float(values.std()),
        "deciles": [float(one) for one in np.quantile(values, np.arange(1, 10) / 10)],
        "worst": {"site": worst, "accuracy": shares[worst]},
        "best": {"site": best, "accuracy": shares[best]},
        "classes": {str(name): list(classes[name]) for name in sorted(classes)},
        "sites": {name: {"accuracy": shares[name], "right": one.right, "images": one.images,
                         "classes": {str(place): list(both) for place, both in one.classes.items()}}
                  for name, one in scores.items()},
    }  # fmt: skip


@held()
def counted(config: Config, sites: Sequence[Site]) -> dict[str, dict[str, int]]:
    """Return, by site, its training images by class. Of very many sites, every n-th is counted."""
    chosen = sites[:: -(-len(sites) // MOST_COUNTED)] if sites else []
    return {site.name: {str(name): count for name, count in class_counts(config, site).items()} for site in chosen}


def common_names(config: Config, said: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return, by class number, its name, if all agree.

    `said`: by site or domain, the names of its classes in the order of their numbers; empty if they are only numbers. Sites
    with numbers have the same classes if outputs are shared, otherwise different ones.
    """
    given = {tuple(names) for names in said}
    if config.data.heads != "shared" and () in given:
        return {}
    places = range(max(map(len, given), default=0))
    found = {place: {plain(names[place])[:MOST_NAME] for names in given if place < len(names)} for place in places}
    return {str(place): names.pop() for place, names in found.items() if len(names) == 1}


def check_models(config: Config, models: Any) -> Models:
    """Return a strategy's models. Raises UserError unless all have names that files can have, as they are written
    (RunFolder).
    """
    told = f"strategy '{config.strategy['name']}': models()"
    if not isinstance(models, Models):
        raise UserError(f"{told} must return a fedloom.server.strategies.Models, not a {type(models).__name__}")
    sites = {site.name for site in config.roster}
    for place, name in enumerate(models):
        if name not in sites and not is_file_name(name):
            raise UserError(f"{told} names a network {name!a}, which is not a valid file name; choose another name")
        if place and name == AGGREGATE:
            raise UserError(
                f"{told} names a network '{name}', which is the file name of the first network; choose another name"
            )
    return models
