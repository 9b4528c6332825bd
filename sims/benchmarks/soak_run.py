"""Runs of sites that only pretend to train, on any grid: which replies do not count in each round, and what remains."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
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
from fedloom.sims.benchmarks.processes import Processes
from fedloom.sims.benchmarks.soak_app import Replay
from fedloom.sims.benchmarks.soak_plan import NODE_ROUNDS, ROUND_TIMEOUT, TASK_TIMEOUT, WINDOW, Plan
from fedloom.sims.engines import ray
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.engines.local_ray import apart, own_signals
from fedloom.sims.engines.ray import RayGrid
from fedloom.sims.operations.scratch_run import joined_channel, round_loop

MOST_REPEATS = 10  # of one round
NODE = {"num_cpus": 1, "include_dashboard": False}
PRINT_ROUNDS = 25

Dropped = dict[int, dict[int, str]]  # by round and site's index: why the reply did not count


@dataclass(frozen=True)
class Left:
    """What a run leaves: the sum's digest after each round, the network's digest, checks, and problems of the ledger.

    `staging`: files of a finished round remain.
    """

    sums: list[str]
    network: str
    checks: dict[str, bool]
    problems: list[str]
    staging: bool


@dataclass(frozen=True)
class Soaked:
    """The result of a run over Ray with faults.

    Attributes:
        seconds: The time of all rounds.
        dropped: By round, the sites whose replies did not count, and why.
        left: What the run left behind.
        nodes_killed: The rounds in which a node was killed.
        repeated: The rounds that were repeated.
        held: Messages and sums that the grid and its pool still held at the end.
        processes: Samples of all processes.
        running: Processes that still ran after the end.
    """

    seconds: float
    dropped: Dropped
    left: Left
    nodes_killed: list[int]
    repeated: list[int]
    held: int
    processes: Processes
    running: list[str]


class Machines(Listener):
    """A Ray cluster of two nodes on this machine, one worker each.

    As a listener it kills the second node in the rounds of the plan, while replies arrive, and replaces it later.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._round, self._due = plan, 0, False
        self._node: Any = None
        self._dead: Any = None
        self.killed: list[int] = []  # rounds
        from ray.cluster_utils import Cluster  # after sims.engines, which makes Ray quiet

        with apart(), own_signals():
            self._cluster = Cluster(initialize_head=True, head_node_args=NODE)
            self._add()

    @property
    def address(self) -> str:
        """The cluster's address."""
        return str(self._cluster.address)

    def round_started(self, round: int, asked: int) -> None:
        self._round, self._due = round, self._plan.events.get(round) == "node"
        if self._node is None and round >= self.killed[-1] + NODE_ROUNDS:
            self._add()

    def reply(self, site: str, ok: bool, reason: str) -> None:
        if self._due and self._node is not None:
            os.kill(self._node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            self.killed.append(self._round)
            self._dead, self._node = self._node, None

    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] % PRINT_ROUNDS == 0:
            line = f"round {record['round']}: {record['replies']} replies, {record['seconds']:.1f} s"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def _add(self) -> None:
        with apart():
            if self._dead is not None:
                self._cluster.remove_node(self._dead, allow_graceful=False)
            self._node = self._cluster.add_node(**NODE)


def over_ray(plan: Plan, root: Path, partial_sums: bool, node_store: bool = False) -> Soaked:
    """Run all rounds over Ray with the plan's faults.

    Args:
        plan: The faults.
        root: The folder for the run.
        partial_sums: Whether workers add up replies (federation.partial_sums).
        node_store: Whether nodes store contributions (federation.node_store).
    """
    processes, machines = Processes(), Machines(plan)
    try:
        config = configured(plan, root, machines.address, partial_sums, root / "kept" if node_store else None)
        grid = ray.start(config, "fedloom.sims.benchmarks.soak_app:app")
        try:
            begin, dropped = time.monotonic(), {}
            loop = begun(config, grid, machines)
            indices = {site.name: site.index for site in config.roster}
            for record in every_round(loop, repeated := []):
                dropped[record["round"]] = {indices[name]: reason for name, reason in record["dropped"].items()}
                processes.sample()
            seconds, held = time.monotonic() - begin, _held(grid)
            loop.state.bring_home()
        finally:
            grid.close()
    finally:
        machines.close()
    running = processes.left()
    return Soaked(seconds, dropped, left_by(loop), machines.killed, repeated, held, processes, running)


def replay(plan: Plan, root: Path, dropped: Mapping[int, Mapping[int, str]]) -> Left:
    """Run the same rounds inline, where exactly the `dropped` sites fail; return what remains."""
    config = configured(plan, root, "", False)
    loop = begun(config, InlineGrid(plan.sites, store_folder(config), Replay(dropped)), Silent())
    list(all_rounds(loop))
    return left_by(loop)


def configured(plan: Plan, root: Path, address: str, partial_sums: bool, store: Path | None = None) -> Config:
    """Return the configuration: sites with 20 images, and time limits short enough for the plan's faults to exceed."""
    return load("digits", [
        f"sites=[{{domain: digits, count: {plan.sites}, samples: 20}}]", f"rounds={plan.rounds}", f"run.root={root}",
        "network.width=0.25", "data.size=8", "evaluation.every=1000000", "engine.workers=2",
        f"federation.timeout={ROUND_TIMEOUT}", f"federation.window={WINDOW}", f"engine.task_timeout={TASK_TIMEOUT}",
        f"engine.address={address}" if address else "engine.name=inline",
        f"federation.partial_sums={str(partial_sums).lower()}", *([f"federation.node_store={store}"] if store else []),
    ])  # fmt: skip


def begun(config: Config, grid: Grid, listener: Listener) -> RoundLoop:
    """Open the run's folder, wait for all sites, and return the loop before its first round."""
    folder = Path(config.run.root) / config.run.name
    RunFolder(folder).open(config)
    channel = joined_channel(grid, config, config.federation.join_timeout)
    loop = round_loop(config, "faults", channel, folder, listener)
    loop.state.attach(channel.parts("faults"))
    return loop


def every_round(loop: RoundLoop, repeated: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the records of all rounds. A round without timely replies is noted in `repeated`, and repeated as on resume."""
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
    """Return what a finished run leaves. Closes its ledger, and reads it again from disk."""
    state = loop.state
    sums = [row.digest["sum"] for row in state.ledger.rounds()]
    network, checks = digest(state.aggregate().state), state.checks()[0]
    state.ledger.close()
    problems = [f"{problem.file}: {problem.what}" for problem in check(state.ledger.folder)]
    return Left(sums, network, checks, problems, state.slots.contributions.staging.exists())


def _held(grid: RayGrid) -> int:
    pool = grid._pool
    held = (grid._messages, grid._sums, pool._queue, pool._suspects, pool._charges, pool._calls, pool._done)
    return sum(map(len, held))
