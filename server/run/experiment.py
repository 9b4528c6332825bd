"""One experiment from start to summary: the main method, its baselines on the same data, and the final measurements."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedloom.clients.data import remarks
from fedloom.clients.data.own import digests, encoding_of
from fedloom.clients.protocol.packing import NONE
from fedloom.clients.training.checks import start_notes
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf.errors import FailedError, plain
from fedloom.conf.machine import forget_peak, peak_memory
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator, has_data, site_rows
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.blobs import file_digest
from fedloom.server.ledger.database import LEDGER, begun
from fedloom.server.ledger.records import STOPPED
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.rounds.privacy import hidden
from fedloom.server.rounds.transport import MOST_REASON
from fedloom.server.run.checks import check, with_mode
from fedloom.server.run.final_evaluation import OWN, counted
from fedloom.server.run.measurement import measure
from fedloom.server.run.training_run import TrainingRun, open_ledger
from fedloom.server.run_folder.folder import SUMMARY, RunFolder, read_config, refuse_existing
from fedloom.server.run_folder.layout import FINISHED
from fedloom.server.run_folder.scores import SCORES
from fedloom.server.strategies.defaults import mode_in_tables
from fedloom.server.unlearning.client_erasure import outstanding, outstanding_text


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
    return work(grid, config, folder, listener, began)


@ordinary()  # checks may have imported code that changes torch's defaults
def work(grid: Grid, config: Config, folder: RunFolder, listener: Listener, began: float) -> dict[str, Any]:
    """Create `folder`, run the rounds and measurements that it lacks, and return the summary; arguments as `carry_out`."""
    lock = folder.begin(config)
    spent = Spent(began, folder.summary())
    summary = {**head(config), "status": "interrupted"}
    with open_ledger(config, folder, lock=lock) as ledger:
        longer = list[str]()
        if config.run.resume:  # before anything else is written
            from fedloom.server.run.more_rounds import extend  # imported only where it is used

            longer = extend(config, folder, ledger)
            config = dataclasses.replace(config, rounds=read_config(folder.path).rounds)
        if _untouched(ledger, folder):
            return folder.summary()
        method: TrainingRun | None = None
        start = newest.id if (newest := ledger.newest()) else 0
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
                if line := outstanding_text(ledger):
                    listener.message(line)
                folder.write_summary(summary)
                ledger.note(summary["status"], {"files": folder.results()})
        _check_certificates(ledger, start)
    listener.finished(summary)
    return summary


def _check_certificates(ledger: Ledger, start: int) -> None:
    """Raise FailedError if the certificate of a request that was verified after the event `start` does not match the run."""
    if written := [event.body["id"] for event in ledger.events("verified", after=start)]:
        from fedloom.server.unlearning.verification import check_certificates  # imported only here: slow

        check_certificates(ledger, written)


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
    found = measure(method, listener.message)
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
        results = measure(method, listener.message)
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
        "method": "/".join(filter(None, (config.strategy["name"], mode_in_tables(config)))),
        "seed": config.seed,
        "rounds": max(config.rounds, last.round) if last else config.rounds,
        "engine": config.engine.name,
        "sites": [row for row in site_rows(config) if row["name"] not in forgotten_sites],
        **({STOPPED: early} if ledger and (early := ledger.stopped()) else {}),
        **({"unlearned": sorted(forgotten_sites)} if forgotten_sites else {}),
        **({"privacy": ways} if (ways := hidden(config)) else {}),
        **({"packed": config.federation.packed} if config.federation.packed != NONE else {}),
    }


class Spent(Listener):
    """Counts the resources of a session since `began` (time.monotonic), and adds those of an earlier summary."""

    def __init__(self, began: float, before: Mapping[str, Any]) -> None:
        resources = before.get("resources")
        self.began, self._before = began, resources if isinstance(resources, Mapping) else {}
        self._begun = False
        forget_peak()  # the peak of an earlier run in this process
        self._seconds, self._start_up = _number(before.get("seconds")), _number(self._before.get("start_up"))

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        """Count the time until the rounds begin as the start-up."""
        if not self._begun:
            self._begun, self._start_up = True, self._start_up + time.monotonic() - self.began

    def entries(self) -> dict[str, Any]:
        """Return the entries for the summary: seconds, start-up seconds, and peak memory in bytes."""
        peak = max(peak_memory(), int(_number(self._before.get("peak_memory"))))
        seconds = self._seconds + time.monotonic() - self.began
        commands = 1 + int(_number(self._before.get("commands", 1 if self._before else 0)))
        return {"seconds": seconds, "resources": {"start_up": self._start_up, "peak_memory": peak, "commands": commands}}


def _number(value: Any) -> float:
    """Return the number, or zero if an edited summary has something else."""
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
