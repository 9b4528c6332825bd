"""One experiment from start to summary: the main method, its baselines on the same data, and the final measurements."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedloom.clients.data import remarks, site_sizes
from fedloom.clients.data.listing import held
from fedloom.clients.data.own import digests, encoding_of
from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.networks import NETWORKS, Architecture, architecture_of
from fedloom.clients.networks.architecture import check_own_networks
from fedloom.clients.networks.base import SelfStarting
from fedloom.clients.networks.head_view import BATCH, MIN_BATCH
from fedloom.clients.objectives import Experiment, objective_of, resolve
from fedloom.clients.protocol.packing import NONE
from fedloom.clients.training.checks import check_sizes, check_training, check_weights, start_notes
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.conf.machine import uncollected
from fedloom.conf.metrics import TARGETS
from fedloom.conf.schema import Config, StoppingConfig
from fedloom.conf.sites import BEST
from fedloom.fusion.exact import ExactSumError, check_range
from fedloom.server.evaluation.evaluator import RECOMPUTED, Evaluator, has_data, site_rows
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.blobs import file_digest
from fedloom.server.ledger.database import LEDGER, begun
from fedloom.server.ledger.records import STOPPED
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.feature_statistics import check as check_standardise
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.rounds.privacy import check_hidden, hidden
from fedloom.server.rounds.schedules import check_asked
from fedloom.server.rounds.transport import MOST_REASON
from fedloom.server.run.final_evaluation import OWN, counted
from fedloom.server.run.resource_usage import Spent
from fedloom.server.run.training_run import TrainingRun, open_ledger
from fedloom.server.run_folder.folder import SUMMARY, RunFolder, read_config, refuse_existing
from fedloom.server.run_folder.layout import FINISHED
from fedloom.server.run_folder.scores import SCORES
from fedloom.server.strategies import STRATEGIES, slots_of
from fedloom.server.strategies.base import check_named
from fedloom.server.unlearning.client_erasure import outstanding


@held()
@uncollected()
def check(config: Config) -> None:
    """Check data, sites and method before anything starts. Raises UserError for what cannot work."""
    _check_method(config)
    check_own_networks(config)
    check_hidden(config)
    if has_data(config):
        site_sizes(config)
    experiment = resolve(config)
    _check_task(experiment)
    for mode in config.baselines:
        objective_of(with_mode(config, mode))
    architectures = experiment.architectures
    for architecture in architectures:
        _check_start(architecture, config.federation.scale_bits)
    check_standardise(experiment)
    check_training(experiment, architectures)
    if has_data(config):
        check_sizes(experiment)
    if config.network:
        NETWORKS.build(architecture_of(config).options, "network")  # checked even if no site has it
    check_weights(experiment)
    STRATEGIES.build(config.strategy, "strategy").check(experiment)
    slots_of(experiment)
    if config.evaluation.statistics == RECOMPUTED and not config.data.validation:
        raise UserError(f"evaluation.statistics={RECOMPUTED} needs validation examples; set data.validation above 0")
    if config.evaluation.statistics == BATCH and config.evaluation.batch < MIN_BATCH:
        raise UserError(
            f"evaluation.batch: got {config.evaluation.batch}, but statistics={BATCH} needs at least {MIN_BATCH}"
        )
    if config.stopping != StoppingConfig() or config.evaluation.keep == BEST:
        from fedloom.server.run.stopping import check_stopping  # imported only where it is used

        check_stopping(experiment)
    metrics_of(config)
    check_asked(config)


def _check_task(experiment: Experiment) -> None:
    """Raise UserError if the method or the loss does not take the targets of the data."""
    if experiment.task not in (fitting := experiment.objective.targets):
        name, takes = experiment.config.objective.get("name"), " or ".join(TARGETS[task] for task in fitting)
        raise UserError(f"objective.name: '{name}' takes {takes}, but the targets here are {TARGETS[experiment.task]}; "
                        "choose another method, such as fedavg or sum_aggregation")  # fmt: skip
    _ = experiment.loss


def _check_start(architecture: Architecture, bits: int) -> None:
    """Raise UserError if a user's network starts with values that the exact sums cannot hold."""
    network = architecture.build()
    if isinstance(network, SelfStarting):
        try:
            check_range(network.state_dict(), bits)
        except ExactSumError as error:
            fault = f"network: '{architecture.options['name']}': {error}, so it cannot be summed"
            raise UserError(f"{fault}; register it with persistent=False if it is constant, or scale it") from None


def _check_method(config: Config) -> None:
    """Raise UserError for unknown names, and for partial sums without workers that can add them up."""
    check_named(config)
    if config.federation.partial_sums and config.engine.name == "flower":
        raise UserError("federation.partial_sums: needs the run's own workers (engine.name=ray); leave it off")
    if config.federation.node_store and not (config.federation.partial_sums and config.engine.name == "ray"):
        raise UserError("federation.node_store: nodes store what their workers add up; set federation.partial_sums=true "
                        "and engine.name=ray")  # fmt: skip


def with_mode(config: Config, mode: str) -> Config:
    """Return the configuration of a baseline: the same experiment with objective.mode=`mode`."""
    own = {"initialisation": "own"} if mode == "independent" else {}
    return dataclasses.replace(config, objective={**config.objective, "mode": mode, **own}, baselines=[])


def run_experiment(grid: Grid, config: Config, listener: Listener, began: float | None = None) -> dict[str, Any]:
    """Run an experiment over the grid, in the folder run.root/run.name, and return the content of summary.json.

    After an interruption (KeyboardInterrupt, SystemExit) or an error, the committed rounds and a summary with status
    "interrupted" or "failed" remain. With run.resume, the run continues from there.

    Args:
        grid: Flower's grid, or an engine's.
        config: the configuration.
        listener: receives the progress.
        began: the time.monotonic() from which seconds are counted; None: now.
    """
    refuse_existing(config)
    check(config)
    return carry_out(grid, config, listener, time.monotonic() if began is None else began)


def carry_out(grid: Grid, config: Config, listener: Listener, began: float) -> dict[str, Any]:
    """Run an experiment that has passed `check`; arguments and result as in `run_experiment`."""
    folder = RunFolder(Path(config.run.root) / config.run.name)
    folder.open(config)
    return work(grid, config, folder, listener, began)


def work(grid: Grid, config: Config, folder: RunFolder, listener: Listener, began: float) -> dict[str, Any]:
    """Run the rounds and measurements that `folder` lacks, and return the summary; arguments as in `run_experiment`."""
    with ordinary():  # checks may have imported code that changes torch's defaults
        return _worked(grid, config, folder, listener, began)


def _worked(grid: Grid, config: Config, folder: RunFolder, listener: Listener, began: float) -> dict[str, Any]:
    spent = Spent(began, folder.summary())
    summary = {**head(config), "status": "interrupted"}
    with open_ledger(config, folder) as ledger:
        longer = list[str]()
        if config.run.resume:  # before anything else is written
            from fedloom.server.run.more_rounds import extend  # imported only where it is used

            longer = extend(config, folder, ledger)
            config = dataclasses.replace(config, rounds=read_config(folder.path).rounds)
        if _untouched(ledger, folder):
            return folder.summary()
        method: TrainingRun | None = None
        try:
            method = TrainingRun(config, folder, ledger, Evaluator(config))
            for line in [*longer, *_notes(config, folder, method)]:
                listener.message(line)
            channel, hearing = method.joined(grid), Listeners([spent, listener])
            while "accuracy" not in summary or method.unlearning().under_way():  # requests may arrive while it measures
                method.train(channel, hearing)
                summary |= _measured(config, method, listener)
                check_sums(folder.path, summary)
                for mode in config.baselines:
                    _add(summary, *_run_baseline(with_mode(config, mode), method, channel, listener))
            summary["status"] = "finished"
        except Exception as error:
            summary |= {"status": "failed", "error": plain(f"{type(error).__name__}: {error}")[:MOST_REASON]}
            raise
        finally:
            if ledger.in_place():
                if method is not None and "accuracy" not in summary:
                    with contextlib.suppress(Exception):  # the first error counts
                        method.leave()
                summary |= {**head(config, ledger), **spent.entries()}
                for request in ledger.waiting(applied=True):
                    listener.message(f"Request '{request.id}' ({', '.join(request.sites)}) waits. "
                                     f"Run `fedloom resume {folder.path}` to process it.")  # fmt: skip
                folder.write_summary(summary)
                ledger.note(summary["status"], {"files": folder.results()})
    listener.finished(summary)
    return summary


def _notes(config: Config, folder: RunFolder, method: TrainingRun) -> list[str]:
    """Return the messages at the start of a run. Write the digests of its data and its tables' columns."""
    advice = method.state.strategy.warnings(method.experiment)
    notes = start_notes(method.experiment)
    if has_data(config):
        files = {path: file_digest(Path(path)) for path in method.experiment.starts}
        notes += [*remarks(config), *folder.note_data({**digests(config.domains), **files})]
        folder.note_tables(method.state.domains(), encoding_of)
    return [*notes, *method.experiment.training.schedule.advice(config.rounds), *advice]


def _measured(config: Config, method: TrainingRun, listener: Listener) -> dict[str, Any]:
    """Measure all networks on test examples, and check the sums. Return entries for the summary."""
    listener.note("measuring on test examples")
    began = time.monotonic()
    found = method.measure()
    if has_data(config):
        found["classes"] = counted(config, method.state.members())
    done = "networks measured and sums checked" if found["checks"] else "networks measured"
    listener.note(f"{done} in {time.monotonic() - began:.1f} s")
    return found


def _add(summary: dict[str, Any], accuracies: dict[str, Any], entries: dict[str, Any]) -> None:
    """Add a baseline's results to the summary."""
    summary["accuracy"] |= accuracies
    for metric, more in entries.pop(SCORES, {}).items():
        summary[SCORES][metric] |= more
    for key, more in entries.items():
        summary[key] = {**summary.get(key, {}), **more}


def check_sums(path: Path, results: Mapping[str, Any]) -> None:
    """Raise FailedError if any of the run's `checks` in its results has failed."""
    if failed := [name for name, holds in results["checks"].items() if not holds]:
        raise FailedError(f"{path}: failed checks: {', '.join(failed)}; do not rely on its sums. "
                          f"Run `fedloom ledger {path} --check` for details")  # fmt: skip


def _untouched(ledger: Ledger, folder: RunFolder) -> bool:
    """Return whether the run is finished, no request waits, and neither ledger nor files have changed since."""
    last = deque(ledger.events(), maxlen=1)[0]
    if ledger.waiting(applied=True) or outstanding(ledger):
        return False
    return last.kind == "finished" and SUMMARY in last.body["files"] and last.body["files"] == folder.results()


def finished(config: Config) -> dict[str, Any]:
    """Return the summary of the run to resume, if it is finished and nothing is left to do; otherwise an empty one."""
    folder = RunFolder(Path(config.run.root) / config.run.name)
    if not (config.run.resume and begun(folder.path / LEDGER) and folder.summary().get("status") == FINISHED):
        return {}
    if config.rounds != read_config(folder.path).rounds:
        return {}
    with Ledger.open(folder.path) as ledger:
        return folder.summary() if _untouched(ledger, folder) else {}


Rows = dict[str, dict[str, float]]
BY_METHOD = ("at_sites", "per_site", "recombination", "layer_selection")  # entries of a summary that baselines add to


def _run_baseline(
    config: Config, main: TrainingRun, channel: ClientChannel, listener: Listener
) -> tuple[Rows, dict[str, Any]]:
    """Run a baseline in its own folder; return its accuracies, and its entries for BY_METHOD.

    The accuracies are those of its shared networks, under the name of its mode; without shared networks, the mean over the
    sites' own.
    """
    mode = config.objective["mode"]
    with main.beside(config, f"baselines/{mode}") as method:
        method.train(channel, listener)
        results = method.measure()
        check_sums(method.folder.path, results)
        per_site = results["per_site"].items()
        results["per_site"] = {f"{mode}: {role}" if role == OWN else mode: scores for role, scores in per_site}
        method.folder.write_summary({**head(config, method.ledger), **results})
        method.ledger.note("finished", {"files": method.folder.results()})
    entries = {key: results[key] for key in BY_METHOD if key in results}
    sites = {site.name for site in config.roster}
    if SCORES in results:
        entries[SCORES] = {metric: _rows(table, mode, sites) for metric, table in results[SCORES].items()}
    return _rows(results["accuracy"], mode, sites), entries


def _rows(table: Rows, mode: str, sites: Collection[str]) -> Rows:
    """Return a baseline's rows of a metric: its shared networks under the mode's name or, without any, the mean of all."""
    shared = [name for name in table if name not in sites]
    if shared:
        return {f"{mode}: {name}" if index else mode: table[name] for index, name in enumerate(shared)}
    return {mode: _mean(list(table.values()))} if table else {}


def _mean(accuracies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means by domain, each over the networks that have it: a network may be for some domains only."""
    values = {key: [accuracy[key] for accuracy in accuracies if key in accuracy] for each in accuracies for key in each}
    return {key: sum(shares) / len(shares) for key, shares in values.items()}


def head(config: Config, ledger: Ledger | None = None) -> dict[str, Any]:
    """Return the entries of summary.json that need no measurement. Sites that the ledger marks as forgotten are left out."""
    forgotten_sites = {name for name, forgotten in ledger.sites().items() if forgotten} if ledger else set()
    last = ledger.last_round() if ledger else None
    return {
        "experiment": config.experiment,
        "method": "/".join(filter(None, (config.strategy["name"], objective_of(config).mode))),
        "seed": config.seed,
        "rounds": max(config.rounds, last.round) if last else config.rounds,
        "engine": config.engine.name,
        "sites": [row for row in site_rows(config) if row["name"] not in forgotten_sites],
        **({STOPPED: early} if ledger and (early := ledger.stopped()) else {}),
        **({"unlearned": sorted(forgotten_sites)} if forgotten_sites else {}),
        **({"privacy": ways} if (ways := hidden(config)) else {}),
        **({"packed": config.federation.packed} if config.federation.packed != NONE else {}),
    }
