"""Measure a method's networks at the end of a run: on every domain, and at single sites on their own test examples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedloom.clients.data import class_counts, label
from fedloom.clients.data.listing import held
from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.evaluation.metrics import Metrics, Scores, blocks_of
from fedloom.clients.evaluation.metrics.chosen import SCORES
from fedloom.clients.networks import Architecture, Model, architecture_of
from fedloom.clients.protocol.reply_checks import MOST_NAME
from fedloom.conf.errors import UserError, plain
from fedloom.conf.metrics import ACCURACY
from fedloom.conf.schema import Config
from fedloom.conf.sites import BEST, Site
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.schedules import looked_at
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Models, View
from fedloom.server.run_folder.folder import AGGREGATE, RunFolder, is_file_name
from fedloom.server.run_folder.scores import METRIC

QUESTION_BYTES = 64 * 2**20  # approximate limit of the networks in one question to sites
OWN = "own"  # key of results by site: the sites' own networks, each at its site
MOST_COUNTED = 1000  # sites whose images are counted by class, at most


@dataclass(frozen=True)
class NetworkScores:
    """A network's scores: `table`, each metric by domain and on the union; `sites`, on each site's test examples."""

    table: Scores
    sites: dict[str, Score]

    @property
    def headline(self) -> dict[str, float]:
        """The first metric by domain and on the union."""
        return next(iter(self.table.values()), {})


Scoring = Callable[[Sequence[Model | None], Sequence[Sequence[Site]]], list[NetworkScores]]


@dataclass
class _Waiting:
    """A network to measure: the table for its first metric (None: `Measured.tables`), its name, users and role."""

    into: dict[str, dict[str, float]] | None
    name: str
    model: Model | None
    users: Sequence[Site] = ()
    role: str = OWN


class Measured:
    """Measures a method's networks one by one, and writes each into the run's folder.

    If sites measure, one question has several networks. `scores`: returns models' scores at their users
    (measurement.scores). `sites`: the sites that are evaluated one by one.
    """

    def __init__(self, state: ServerState, folder: RunFolder, evaluator: Evaluator, scores: Scoring) -> None:
        self.state, self.folder, self.evaluator, self._scores = state, folder, evaluator, scores
        self.config, self.aggregate = state.config, state.display_name
        self.models = check_models(self.config, state.models())
        self.metrics = evaluator.metrics
        self.tables: dict[str, Scores] = {}  # by network
        self.forgotten: dict[str, dict[str, float]] = {}
        self.facts: dict[str, Any] = {}
        self.unmoved = True  # whether the aggregate has the same bits without each site that was measured
        self.at: dict[str, dict[str, Score]] = {}
        view = state.view()
        chosen = set(looked_at(self.config, trained(view)))
        self.sites = [site for site in view.sites if site.name in chosen]
        folder.note_networks(site.name for site in self.sites if site.name in self.models)  # at once: there may be many
        self._waiting: list[_Waiting] = []
        self._served: set[Architecture] = set()  # architectures whose first shared network has been measured

    def network(self, name: str) -> None:
        """Write and measure the network with this name in `models`."""
        model = self.evaluator.with_statistics(self.models[name])
        self.folder.write_network(AGGREGATE if name == self.aggregate else name, model, self.config, display_name=name)
        own = [site for site in self.sites if site.name == name]
        self.measure(None, name, model, own or self._users(model.architecture), OWN if own else AGGREGATE)
        self.facts |= model.facts

    def site(self, site: Site) -> None:
        """Measure a site's own network, and the aggregate without it, if the site is one of `sites`."""
        if site not in self.sites:
            return
        if site.name in self.models:
            self.network(site.name)
        if (rest := self.state.without([site.name])) is not None:
            self.measure(self.forgotten, site.name, rest)
            self.unmoved = self.unmoved and _same_bits(rest.state, self.state.aggregate().state)

    def measure(
        self, into: dict[str, dict[str, float]] | None, name: str, model: Model | None, users: Sequence[Site] = (),
        role: str = OWN,
    ) -> None:  # fmt: skip
        """Queue a model; its first metric goes to `into[name]`. Measure now, unless `measure_queued` does it later.

        Without `into`, all its metrics go to `tables`.

        Sites measure several models per request; the server measures each at once. `role`: OWN or AGGREGATE, for `per_site`.
        """
        self._waiting.append(_Waiting(into, name, model, users, role))
        models = [each.model for each in self._waiting if each.model is not None]
        size = sum(tensor.nbytes for model in models for tensor in model.state.values())
        if self.config.evaluation.where == "server" or size > QUESTION_BYTES:
            self.measure_queued()

    def measure_queued(self) -> None:
        """Measure the queued models now."""
        waiting, self._waiting = self._waiting, []
        results = self._scores([each.model for each in waiting], [each.users for each in waiting]) if waiting else []
        for network, result in zip(waiting, results, strict=True):
            if network.into is None:
                self.tables[network.name] = result.table
            else:
                network.into[network.name] = result.headline
            self.at.setdefault(network.role, {}).update({name: each for name, each in result.sites.items() if each.images})

    def per_site(self) -> dict[str, Any]:
        """Return the summary's `per_site`: scores at the sites, by role of the networks (aggregate, own)."""
        places = {} if self.metrics.only_accuracy else blocks_of(self.config)
        blocks = {site.name: places[label(site.spec)] for site in self.sites if label(site.spec) in places}
        return {role: spread(scores, self.metrics, blocks) for role in (AGGREGATE, OWN) if (scores := self.at.get(role))}

    def entries(self) -> dict[str, Any]:
        """Return the summary's `accuracy` (by network and domain) and, if other metrics are configured, `scores` (by
        metric, network and domain) and `metric` (the first one's facts).
        """
        records = {name: self.metrics.entries(table) for name, table in self.tables.items()}
        accuracy = {name: shares for name, record in records.items() if (shares := record.get(ACCURACY))}
        if self.metrics.only_accuracy:
            return {ACCURACY: accuracy}
        first, scores = self.metrics.first, dict[str, dict[str, Any]]()
        for name, record in records.items():
            for metric, shares in record[SCORES].items():
                scores.setdefault(metric, {}).update({name: shares} if shares else {})
        facts = {"name": first.name, "higher_is_better": first.higher_is_better, "share": first.share}
        return {ACCURACY: accuracy, SCORES: scores, METRIC: facts}

    def warnings(self) -> list[str]:
        """Return a warning if subtracting a site does not change the aggregate."""
        if not (self.forgotten and self.unmoved):
            return []
        return [f"Warning: the {self.aggregate} has the same bits without any of the measured sites, so forgetting a site "
                "removes its contributions and does not change the network. Does the strategy's models(view) use the "
                "view's slots?"]  # fmt: skip

    def _users(self, architecture: Architecture) -> list[Site]:
        """Return the sites that would use a shared network: those of its architecture, for the first such network only."""
        if architecture in self._served:
            return []
        self._served.add(architecture)
        return [site for site in self.sites if architecture_of(self.config, site) == architecture]


def trained(view: View) -> list[str]:
    """Return the names of the sites that have trained, by the ledger; if it has none, of all sites."""
    active: set[str] = {site.name for site in view.sites if view.last_put(site.name)}
    for row in view.ledger.rounds():
        record = row.record or {}
        if row.round and not record.get("recalibrated"):
            active |= set(record.get("bytes") or {}) - set(record.get("dropped") or {})
    names = [site.name for site in view.sites]
    return [name for name in names if name in active] or names


def spread(
    scores: Mapping[str, Score], metrics: Metrics | None = None, blocks: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Return scores at sites for the summary: each score, their spread over sites, and totals by class.

    Every site has the same weight in the spread. `blocks`: by site, the place of its classes (`blocks_of`).
    """
    if metrics is not None and not metrics.only_accuracy:
        from fedloom.server.evaluation.spread import spread_of_metrics  # imported only where it is used

        return spread_of_metrics(scores, metrics, blocks or {})
    shares = {name: score.right / score.images for name, score in scores.items()}
    worst, best = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    values, classes = np.array(list(shares.values())), dict[int, tuple[int, int]]()
    for score in scores.values():
        for name, (right, images) in score.classes.items():
            before = classes.get(name, (0, 0))
            classes[name] = before[0] + right, before[1] + images
    return {
        "mean": float(values.mean()),
        "deviation": float(values.std()),
        "deciles": [float(decile) for decile in np.quantile(values, np.arange(1, 10) / 10)],
        "worst": {"site": worst, "accuracy": shares[worst]},
        "best": {"site": best, "accuracy": shares[best]},
        "classes": {str(name): list(classes[name]) for name in sorted(classes)},
        "sites": {name: {"accuracy": shares[name], "right": score.right, "images": score.images,
                         "classes": {str(number): list(both) for number, both in score.classes.items()}}
                  for name, score in scores.items()},
    }  # fmt: skip


@held()
def counted(config: Config, sites: Sequence[Site]) -> dict[str, dict[str, int]]:
    """Return the number of each site's training examples by class. Of very many sites, every n-th is counted."""
    chosen = sites[:: -(-len(sites) // MOST_COUNTED)] if sites else []
    return {site.name: {str(name): count for name, count in class_counts(config, site).items()} for site in chosen}


def common_names(config: Config, said: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the names of classes, by number, on which all sites agree.

    `said`: by site or domain, the names of its classes in the order of their numbers; empty if they are only numbers. Sites
    with numbers have the same classes if outputs are shared, otherwise different ones.
    """
    listed = {tuple(names) for names in said}
    if config.data.heads != "shared" and () in listed:
        return {}
    numbers = range(max(map(len, listed), default=0))
    names_of = {number: {plain(names[number])[:MOST_NAME] for names in listed if number < len(names)} for number in numbers}
    return {str(number): names.pop() for number, names in names_of.items() if len(names) == 1}


def check_models(config: Config, models: Any) -> Models:
    """Return `models`. Raises UserError if they are not `Models`, or a name cannot be a file's name."""
    subject = f"strategy '{config.strategy['name']}': models()"
    if not isinstance(models, Models):
        raise UserError(f"{subject} must return a fedloom.server.strategies.Models, not a {type(models).__name__}")
    sites = {site.name for site in config.roster}
    if config.evaluation.keep == BEST and next(iter(models), "") in {"", *sites}:
        raise UserError(f"evaluation.keep: {BEST} needs one network for all sites, and this method has none; set it to last")
    for index, name in enumerate(models):
        if name not in sites and not is_file_name(name):
            raise UserError(f"{subject} names a network {name!a}, which is not a valid file name; choose another name")
        if config.evaluation.keep == BEST and name == BEST:
            raise UserError(f"{subject} names a network '{name}', the file name of evaluation.keep={BEST}; choose another")
        if index and name == AGGREGATE:
            raise UserError(f"{subject} names a network '{name}', the file name of the first one; choose another name")
    return models


def _same_bits(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
