"""Random sequences of rounds, forgetting, readmission and crashes, against a plain model of dictionaries."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import ROUND, SITE
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Setup
from tests.server.parts import given, staged
from tests.server.test_strategy import everyone, many, records

SEQUENCES = 1000
SITES = everyone()
NAMES = [site.name for site in SITES]
CONFIG = many(Path("of-no-run"))  # read once: the folder is the ledger's
# (what, of which site): "lost" is a reply that comes before a crash and is never committed
steps = st.lists(st.tuples(st.sampled_from(["round", "forget", "readmit", "lost"]), st.integers(0, len(NAMES) - 1)),
                 min_size=1, max_size=6)  # fmt: skip


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder that is no disk, where there is one: many ledgers are made in it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


class Plain:
    """What each site that takes part has in the sum."""

    def __init__(self, initial: State) -> None:
        self.initial, self.held, self.round = initial, dict.fromkeys(NAMES, initial), 0

    def total(self) -> State:
        """Added up afresh."""
        total = ExactSum(32)
        for state in self.held.values():
            total.add(state)
        return total.totals


@hypothesis.given(sequence=steps)
@settings(max_examples=SEQUENCES, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
def test_any_sequence_leaves_what_a_plain_model_says(memory: Path, sequence: list[tuple[str, int]]):
    folder = Path(tempfile.mkdtemp(dir=memory))
    aggregate = opened(folder)
    model = Plain(aggregate.slots.contribution("sum", NAMES[0]))
    for what, place in sequence:
        aggregate = STEPS[what](aggregate, model, NAMES[place])
        agree(aggregate, model)
    aggregate = crashed(aggregate)
    agree(aggregate, model)
    aggregate.ledger.close()
    shutil.rmtree(folder)


def opened(folder: Path) -> ServerState:
    there = (folder / "ledger.sqlite").is_file()
    ledger = Ledger.open(folder) if there else Ledger.create(folder, "run", "", 32, NAMES)
    return ServerState(Setup(resolve(CONFIG), SITES, folder, ledger))


def crashed(aggregate: ServerState) -> ServerState:
    """The process is gone, its ledger not closed; another one comes."""
    aggregate.ledger.__exit__(RuntimeError)
    return opened(aggregate.ledger.folder)


def agree(aggregate: ServerState, model: Plain) -> None:
    assert [site.name for site in aggregate.members()] == [name for name in NAMES if name in model.held]
    assert digest(aggregate.slots.total("sum").totals) == digest(model.total()) == aggregate.digest()["sum"]
    assert aggregate.slots.total("sum").addends == len(model.held)
    for name, state in model.held.items():
        assert digest(aggregate.slots.contribution("sum", name)) == digest(state)


def replied(aggregate: ServerState, model: Plain, name: str) -> State:
    """A reply of the site, folded and not committed."""
    reply = records(aggregate.config, name, model.round + 1)
    site = SITES[NAMES.index(name)]
    assert staged(aggregate, model.round + 1, [given(site, {key: reply[key] for key in (SITE, ROUND)})]) == {}
    return quantise(reply[SITE], 32)


def a_round(aggregate: ServerState, model: Plain, name: str) -> ServerState:
    if name in model.held:
        model.held[name] = replied(aggregate, model, name)
        model.round += 1
        aggregate.commit(model.round, {})
    return aggregate


def a_lost_reply(aggregate: ServerState, model: Plain, name: str) -> ServerState:
    if name in model.held:
        replied(aggregate, model, name)
    return crashed(aggregate)


def forgotten(aggregate: ServerState, model: Plain, name: str) -> ServerState:
    if name not in model.held or len(model.held) == 1:
        with pytest.raises(UserError):
            aggregate.membership.forget([name], {})
    else:
        aggregate.membership.forget([name], {})
        del model.held[name]
    return aggregate


def readmitted(aggregate: ServerState, model: Plain, name: str) -> ServerState:
    if name in model.held:
        with pytest.raises(UserError):
            aggregate.readmit([name])
    else:
        aggregate.readmit([name])
        model.held[name] = model.initial
    return aggregate


STEPS = {"round": a_round, "forget": forgotten, "readmit": readmitted, "lost": a_lost_reply}
