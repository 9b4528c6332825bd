"""What a machine with a registered key may send, over TLS and a SuperLink of its own: none of it ends a run or enters the
sum unseen."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings

from fedloom.clients.app import app
from fedloom.clients.protocol.messages import TRAIN, read_order
from fedloom.conf import Config, load
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import flower
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.federation import local
from fedloom.sims.federation.plan import SERVER, Plan, write_plan
from fedloom.sims.federation.programs import free_port, running
from tests.flower.lies import Lie, lies
from tests.flower.speaker import FAULTS, LATE_SECONDS, Speaker
from tests.server.parts import Recorder, close_all, contribution, started, sum_of_contributions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("site-0000", "site-0001", "site-0002")
WAIT_SECONDS = 20
assert WAIT_SECONDS < LATE_SECONDS
PLANNED = {  # by round and place: what comes, and why it does not count (empty: it counts)
    (2, 1): ("late", f"no reply within {WAIT_SECONDS} s"),
    (2, 2): ("half", f"no reply within {WAIT_SECONDS} s"),
    (3, 1): ("twice", ""),
    (3, 2): ("another run's", f"no reply within {WAIT_SECONDS} s"),
    (4, 1): ("garbage", "its reply cannot be read (UnicodeDecodeError"),
    (4, 2): ("no records", "its reply cannot be read (it holds no records)"),
    (5, 1): ("a bomb", "its reply cannot be read (it unfolds to more than 256 MiB)"),
    (5, 2): ("another's message", ""),
    (6, 1): ("NaN", "tensor 'extractor.0.weight' has entries that are not finite"),
    (6, 2): ("other shapes", "record 'round', tensor 'head.bias': shape [1], expected [10]"),
}
ROUNDS = 7
LIES = 15  # over a real SuperLink; hundreds take the same way but for it in tests/server/test_lies.py
JOIN_SECONDS = 10.0  # for the one of three that comes


def configured(root: Path, name: str, engine: str, *more: str) -> Config:
    sites = ", ".join("{domain: digits, samples: 20}" for _ in NAMES)
    fixed = [f"sites=[{sites}]", "data.size=8", "data.test_limit=20", "baselines=[]", "seed=3"]
    return load("digits", [*fixed, "training.epochs=1", f"engine.name={engine}", f"run.root={root}", f"run.name={name}",
                           "evaluation.sites=0", "federation.min_replies=1", "network.width=0.25", *more])  # fmt: skip


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A SuperLink with TLS and the folders of three registered nodes that do not run."""
    folder = tmp_path_factory.mktemp("machines") / "federation"
    write_plan(Plan(port=free_port(), tls=True, sites=[{"name": name} for name in NAMES]), folder)
    try:
        local.start_server(folder)
        yield folder
    finally:
        local.down(folder)
        assert not running(folder / SERVER)


@contextlib.contextmanager
def speakers(folder: Path) -> Iterator[None]:
    """A machine for each site."""
    words = [sys.executable, "-m", "tests.flower.speaker"]
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            log = stack.enter_context((folder / name / "log.txt").open("wb"))
            child = stack.enter_context(subprocess.Popen([*words, str(folder / name)], stdout=log, stderr=log))
            stack.callback(child.terminate)
        yield


@pytest.fixture(scope="module")
def played(machines: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run in which two of three machines do what is PLANNED: its summary, and the records of its rounds."""
    for place, name in enumerate(NAMES):
        lines = [f"{round} {kind}" for (round, at), (kind, _) in PLANNED.items() if at == place]
        (machines / name / FAULTS).write_text("\n".join(lines))
    listener, root = Recorder(), tmp_path_factory.mktemp("runs")
    config = configured(root, "played", "flower", f"engine.address={machines}", f"rounds={ROUNDS}",
                        f"federation.timeout={WAIT_SECONDS}")  # fmt: skip
    with speakers(machines), contextlib.closing(flower.start(config)) as grid:
        return run_experiment(grid, config, listener), listener.records


@pytest.mark.parametrize(("round", "place"), PLANNED)
def test_a_fault_is_its_sites_alone_and_reported_by_name(played: Any, round: int, place: int):
    """Late, twice, half, garbage, another run's and another node's message, a bomb, NaN, other shapes."""
    kind, reason = PLANNED[round, place]
    dropped = played[1][round - 1]["dropped"]
    assert (reason in dropped[NAMES[place]]) if reason else (NAMES[place] not in dropped), (kind, dropped)
    assert NAMES[0] not in dropped


class Silenced(ClientApp):
    """The real ClientApp, at sites whose replies come to nothing in the rounds in which the plan says so."""

    def __call__(self, message: Message, context: Context) -> Message:
        order = read_order(message.content)
        if message.metadata.message_type == TRAIN and PLANNED.get((order.round, order.site), ("", ""))[1]:
            raise RuntimeError("nothing of use")
        return app(message, context)


def test_what_is_refused_leaves_the_bits_of_a_run_in_which_it_never_came(played: Any, tmp_path: Path):
    config = configured(tmp_path, "inline", "inline", f"rounds={ROUNDS}")
    expected = run_experiment(InlineGrid(len(NAMES), tmp_path / "stores", Silenced()), config, Recorder())
    assert played[0]["digest"] == expected["digest"] and all(played[0]["checks"].values())
    assert [record["replies"] for record in played[1]] == [3, 1, 2, 1, 2, 1, 3]


@dataclass
class Liar:
    """The last site's machine in a thread of this process, which answers orders with one lie; and a run that asks it."""

    config: Config
    loop: RoundLoop
    digest: dict[str, str]
    others: dict[str, State]
    lie: Lie | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def asked_with(self, lie: Lie) -> tuple[int, dict[str, str]]:
        """Ask it; how many replies counted, and why others did not. Nothing of it stays."""
        self.lie, site = lie, self.config.roster[-1]
        self.loop.transport.dropped = {}
        run = self.loop.state.round_context(1, Participation([site], 1), self.loop.transport)
        with contextlib.suppress(TooFewRepliesError):
            self.loop.state.strategy.round(run)
        return len(run.losses), self.loop.transport.dropped

    def answer(self, home: Path) -> None:
        """What its thread does."""
        with Speaker(home) as node:
            while not self.stop.is_set():
                if (asked := node.take()) is None:
                    time.sleep(0.002)
                elif self.lie is None or asked.metadata.message_type != TRAIN:
                    node.send(node.honest(asked))
                else:
                    self.lie(node, asked)


@pytest.fixture(scope="module")
def liar(machines: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    config = configured(tmp_path_factory.mktemp("runs"), "lies", "flower", f"engine.address={machines}",
                        "federation.timeout=20", "network={name: mlp, widths: [2]}")  # fmt: skip
    with contextlib.closing(flower.start(config)) as grid:
        grid.poll_seconds = 0.002
        federation = ClientChannel(grid, config.roster, 0)
        aggregation = started(config)
        loop = RoundLoop(config, "run", federation, aggregation, Evaluator(config), Recorder())
        one = Liar(config, loop, aggregation.digest(), {name: contribution(aggregation, name) for name in NAMES[:-1]})
        thread = threading.Thread(target=one.answer, args=[machines / NAMES[-1]])
        thread.start()
        try:
            federation.join(JOIN_SECONDS, fewest=1)
            yield one
        finally:
            one.stop.set()
            thread.join()
            close_all()


@given(lie=lies())
@settings(max_examples=LIES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_no_lie_ends_a_run_or_enters_the_sum_unseen(liar: Liar, lie: Lie):
    """Each is refused, with its site's name and a reason, or harmless: the sum is that of the contributions."""
    aggregation = liar.loop.state
    counted, dropped = liar.asked_with(lie)
    if counted:
        assert not dropped and sum_of_contributions(aggregation) == aggregation.digest()["sum"]
        assert all(contribution(aggregation, name) is not None for name in liar.others)
    else:
        assert list(dropped) == [NAMES[-1]] and dropped[NAMES[-1]].isprintable()
        assert aggregation.digest() == liar.digest
    aggregation.abandon()
    assert aggregation.digest() == liar.digest
