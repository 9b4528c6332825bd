"""Measure a method's run at the end: all its networks, and the aggregate without each site."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fedloom.clients.data import class_names, variant
from fedloom.clients.data.listing import held
from fedloom.clients.networks import Model
from fedloom.conf.metrics import CLASS
from fedloom.conf.sites import BEST, PERSONAL, Site
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.evaluation.per_client_metrics import at_sites, costs, different_networks
from fedloom.server.run.final_evaluation import Measured, NetworkScores, common_names
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.strategies.defaults import mode_in_tables


def scores(method: TrainingRun, models: Sequence[Model | None], users: Sequence[Sequence[Site]]) -> list[NetworkScores]:
    """Return each model's metrics by domain, and its scores on its users' test examples. None: sites' own networks.

    The result is empty if no connected site can measure it.
    """
    if method.config.evaluation.where == "server" and None not in models:
        return [NetworkScores(method.evaluator.table(model, "test"), method.evaluator.at_sites(model, sites))
                for model, sites in zip(models, users, strict=True) if model is not None]  # fmt: skip
    if method.loop is None:
        return [NetworkScores({}, {}) for _ in models]
    measuring, by_model = method.loop.sites, method.loop.sites.scores(models, "test")
    of_users = [{site.name: found[site.name] for site in sites if site.name in found}
                for found, sites in zip(by_model, users, strict=True)]  # fmt: skip
    return [NetworkScores(measuring.table(scores), own) for scores, own in zip(by_model, of_users, strict=True)]


@held()
def measure(method: TrainingRun, warn: Callable[[str], object]) -> dict[str, Any]:
    """Measure and write all the method's networks, and the aggregate without each site; return entries for the summary.

    Every contribution is read once, and checked against the sums. `warn`: shows the user a line.
    """
    state, at_users = method.state, functools.partial(scores, method)
    measured = Measured(state, method.folder, method.evaluator, at_users)
    members = {site.name for site in state.members()}
    method.folder.write_standardisation(state.features.records())
    for name in measured.models:
        if name not in members:
            measured.network(name)
    if best := method.folder.best():
        measured.measure(None, BEST, Model(state.aggregate().architecture, method.folder.best_state()))
    checks, again = state.checks(measured.site)
    backwards: dict[str, dict[str, float]] = {}
    if again is not None and measured.aggregate:
        measured.measure(backwards, "", state.aggregate(again))
    if not measured.models or state.strategy.personal:
        measured.measure(None, PERSONAL, None, measured.sites)
    measured.measure_queued()
    for line in measured.warnings():
        warn(line)
    return {
        "aggregate": measured.aggregate,
        **measured.entries(),
        **({BEST: best} if best else {}),
        "reversed": backwards.get("", {}),
        "forgotten": measured.forgotten,
        "per_site": measured.per_site(),
        "digest": state.digest(),
        "checks": checks,
        "traces": {trace.location: trace.reason for trace in state.residue()},
        **_of_different_networks(method),
        **state.strategy.summary_entries(state.view()),
        **measured.facts,
        **({"class_names": names} if (names := _class_names(method)) else {}),
    }


def _class_names(method: TrainingRun) -> dict[str, str]:
    """Return the members' class names by number. Sites with their own data report them when they enrol."""
    members = method.state.members()
    if has_data(method.config):
        return common_names(method.config, map(class_names, {variant(site.spec): site.spec for site in members}.values()))
    return common_names(method.config, method.loop.transport.participants.enrolled_names(members) if method.loop else ())


def _of_different_networks(method: TrainingRun) -> dict[str, Any]:
    """Return accuracies at the sites and costs, if sites have different architectures and the server has the images."""
    sites = method.state.members()
    classes = method.evaluator.metrics.kind == CLASS
    if method.config.evaluation.where != "server" or not different_networks(method.config, sites) or not classes:
        return {}
    models = method.state.models()
    known = at_sites(method.evaluator, sites, models)  # empty if the server has no networks
    return {"at_sites": {mode_in_tables(method.config): known} if known else {},
            "costs": costs(method.evaluator, sites, models)}  # fmt: skip
