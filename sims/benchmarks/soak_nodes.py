"""The machines of a soak: a Ray cluster of two nodes on this one, of which the second is killed now and then."""

import os
import signal
import sys
from typing import Any

from fedloom.server.rounds.listener import Listener
from fedloom.sims.benchmarks.soak_plan import NODE_ROUNDS, Plan
from fedloom.sims.engines.ray import apart, own_signals

NODE = {"num_cpus": 1, "include_dashboard": False}
TELL = 25  # rounds


class Machines(Listener):
    """Two nodes, one worker each; a listener that kills the second as planned, while replies come in, and replaces it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._round, self._due = plan, 0, False
        self._node: Any = None
        self._dead: Any = None
        self.killed: list[int] = []  # rounds
        from ray.cluster_utils import Cluster  # after sims.engines, which tells Ray what not to shout

        with apart(), own_signals():
            self._cluster = Cluster(initialize_head=True, head_node_args=NODE)
            self._add()

    @property
    def address(self) -> str:
        """Where the cluster is."""
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
        if record["round"] % TELL == 0:
            told = f"round {record['round']}: {record['replies']} replies, {record['seconds']:.1f} s"
            print(told, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def _add(self) -> None:
        with apart():
            if self._dead is not None:
                self._cluster.remove_node(self._dead, allow_graceful=False)
            self._node = self._cluster.add_node(**NODE)
