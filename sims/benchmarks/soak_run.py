"""Runs of sites that only pretend to train, on any grid: what was dropped in each round, and what a run leaves."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.fusion.state import digest
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.listener import Listener, Silent
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.training_run import all_rounds, one_round
from fedloom.server.run_folder.folder import RunFolder
from fedloom.sims.benchmarks.soak_app import Replay
from fedloom.sims.benchmarks.soak_nodes import Machines
from fedloom.sims.benchmarks.soak_plan import ROUND_TIMEOUT, TASK_TIMEOUT, WINDOW, Plan
from fedloom.sims.benchmarks.soak_watch import Processes
from fedloom.sims.engines import ray
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.engines.ray import RayGrid
from fedloom.sims.operations.scratch_run import joined_channel, round_loop

MOST_REPEATS = 10  # of one round

Dropped = dict[int, dict[int, str]]  # by round: the places of the sites whose replies did not count, and why


@dataclass(frozen=True)
class Left:
    """What a run leaves: the sum's digest after each round, the aggregated network's, checks, what is wrong with the ledger.

    `staging`: whether something of a round that is over is still there.
    """

    sums: list[str]
    network: str
    checks: dict[str, bool]
    problems: list[str]
    staging: bool


@dataclass(frozen=True)
class Soaked:
    """A run over Ray. `kept`: messages and sums that grid and pool held at its end."""

    seconds: float
    dropped: Dropped
    left: Left
    nodes_killed: list[int]
    repeated: list[int]
    kept: int
    processes: Processes
    running: list[str]


def over_ray(plan: Plan, root: Path, partial_sums: bool, node_store: bool = False) -> Soaked:
    """All rounds over Ray, with all that the plan says."""
    processes, machines = Processes(), Machines(plan)
    try:
        config = configured(plan, root, machines.address, partial_sums, root / "kept" if node_store else None)
        grid = ray.start(config, "fedloom.sims.benchmarks.soak_app:app")
        try:
            begin, dropped = time.monotonic(), {}
            loop = begun(config, grid, machines)
            places = {site.name: site.index for site in config.roster}
            for record in every_round(loop, repeated := []):
                dropped[record["round"]] = {places[name]: reason for name, reason in record["dropped"].items()}
                processes.sample()
            seconds, kept = time.monotonic() - begin, _kept(grid)
            loop.state.bring_home()
        finally:
            grid.close()
    finally:
        machines.close()
    running = processes.left()
    return Soaked(seconds, dropped, left_by(loop), machines.killed, repeated, kept, processes, running)


def replay(plan: Plan, root: Path, dropped: Dropped) -> Left:
    """The same on the inline engine, where exactly these sites fail and nothing else goes wrong."""
    config = configured(plan, root, "", False)
    loop = begun(config, InlineGrid(plan.sites, store_folder(config), Replay(dropped)), Silent())
    for _ in all_rounds(loop):
        pass
    return left_by(loop)


def configured(plan: Plan, root: Path, address: str, partial_sums: bool, kept: Path | None = None) -> Config:
    """The experiment: sites of 20 images, and limits of time that the plan's faults exceed."""
    entry = f"sites=[{{domain: digits, count: {plan.sites}, samples: 20}}]"
    small = ["network.width=0.25", "data.size=8", "evaluation.every=1000000", f"rounds={plan.rounds}", f"run.root={root}"]
    limits = [f"federation.timeout={ROUND_TIMEOUT}", f"federation.window={WINDOW}", f"engine.task_timeout={TASK_TIMEOUT}"]
    engine = [f"engine.address={address}"] if address else ["engine.name=inline"]
    sums = f"federation.partial_sums={str(partial_sums).lower()}"
    store = [f"federation.node_store={kept}"] if kept else []
    return load("digits", [entry, *small, *limits, *engine, "engine.workers=2", sums, *store])


def begun(config: Config, grid: Grid, listener: Listener) -> RoundLoop:
    """All of a run before its first round."""
    folder = Path(config.run.root) / config.run.name
    RunFolder(folder).open(config)
    channel = joined_channel(grid, config, config.federation.join_timeout)
    loop = round_loop(config, "faults", channel, folder, listener)
    loop.state.attach(channel.parts("faults"))
    return loop


def every_round(loop: RoundLoop, repeated: list[int]) -> Iterator[dict[str, Any]]:
    """The records of all rounds. One in which no reply came in time is noted and repeated, as the run's resumption would."""
    for round in range(1, loop.last + 1):
        while True:
            try:
                yield one_round(loop, round)
                break
            except TooFewRepliesError:
                repeated.append(round)
                if repeated.count(round) > MOST_REPEATS:
                    raise


def left_by(loop: RoundLoop) -> Left:
    """What a run leaves that has ended; its ledger is closed, and read again from disk."""
    aggregation = loop.state
    sums = [row.digest["sum"] for row in aggregation.ledger.rounds()]
    network, checks = digest(aggregation.aggregate().state), aggregation.checks()[0]
    aggregation.ledger.close()
    problems = [f"{problem.file}: {problem.what}" for problem in check(aggregation.ledger.folder)]
    return Left(sums, network, checks, problems, aggregation.slots.contributions.staging.exists())


def _kept(grid: RayGrid) -> int:
    pool = grid._pool
    held = (grid._messages, grid._sums, pool._queue, pool._suspects, pool._charges, pool._calls, pool._done)
    return sum(map(len, held))
