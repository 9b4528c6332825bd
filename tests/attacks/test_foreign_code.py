"""No configuration that a server sends makes a real site import or call code that the site's owner has not named."""

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedloom.clients.job import moment
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.messages import ENROL, EVALUATE, MEAN, MODEL, ORDER, SITE, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.conf import UserError, load
from fedloom.conf.plugins import outside
from fedloom.sims.engines.adapter import site_context
from tests.attacks.hostile import WORDS, Server

CALL = "a_trap:make"  # in place of a trap's own name
CODE = """
from pathlib import Path
Path(r'{0}').write_text('imported')
def make(*args, **kwargs):
    Path(r'{0}').write_text('called')
"""
Tree = dict[str, Any]
Change = Callable[[Tree], None]


@dataclass(frozen=True)
class Trap:
    """A module at the site which leaves the file `proof` as soon as it is imported or called."""

    name: str
    proof: Path

    @property
    def call(self) -> str:
        """Its function, as configurations name it."""
        return f"{self.name}:make"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A trap with a name of its own, since processes cache what they have loaded by a name."""
    made = Trap(f"trap_{uuid.uuid4().hex}", tmp_path / "proof")
    (tmp_path / f"{made.name}.py").write_text(CODE.format(made.proof))
    monkeypatch.syspath_prepend(tmp_path)
    return made


def at(path: str, value: Any) -> Change:
    """Set one key of the configuration: `sites.0.networks`."""

    def change(tree: Tree) -> None:
        *before, last = path.split(".")
        place: Any = tree
        for key in before:
            place = place[int(key) if key.isdigit() else key]
        place[int(last) if last.isdigit() else last] = value

    return change


NAMED: dict[str, Any] = {"name": CALL}
SECTIONS: dict[str, Change] = {
    "network": at("network", NAMED),
    "network in a network": at("network", {"name": "exits", "of": CALL}),
    "network in a network of the site": at("sites.0.network", {"name": "split", "at": "0", "of": CALL}),
    "own network": at("sites.0.network", NAMED),
    "one of own networks": at("sites.0.networks", [NAMED]),
    "the second of own networks": at("sites.0.networks", [{"name": "mlp", "widths": [4]}, NAMED]),
    "another site's network": lambda tree: tree["sites"].append({**tree["sites"][0], "count": 1, "network": NAMED}),
    "another site's networks": lambda tree: tree["sites"].append({**tree["sites"][0], "count": 1, "networks": [NAMED]}),
    "objective": at("objective", NAMED),
    "base learner": at("objective", {"name": "layer_selection", "learner": CALL}),
    "search": at("objective", {"name": "layer_selection", "search": NAMED}),
    "search by its name": at("objective", {"name": "layer_selection", "search": CALL}),
    "auxiliary": at("objective", {"name": "components", "auxiliary": [CALL]}),
    "optimizer": at("training.optimizer", NAMED),
    "schedule": at("training.schedule", CALL),
    "loss": at("training.loss", CALL),
    "strategy": at("strategy", NAMED),
    "domain": at("sites.0.domain", CALL),
    "partition": at("sites.0.partition", NAMED),
    "augmentation": at("training.augment", [NAMED]),
    "metric": at("evaluation.metrics", [CALL]),
}


POLICIES: dict[str, dict[str, Any]] = {"open": {}, "own data": {"domain": "digits"}, "strict": {
    "masks": "required", "epsilon": 1.0, "networks": "mlp,exits,split", "objectives": "fedavg,layer_selection,components",
    "optimizers": "sgd", "strategies": "sum_aggregation", "publish": "none", "min_members": 5}}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rules"), [(ENROL, "open"), (TRAIN, "open"), (EVALUATE, "open"), (ENROL, "own data"), (TRAIN, "own data"),
                        (ENROL, "strict")])  # fmt: skip
@pytest.mark.parametrize("section", SECTIONS)
def test_a_site_calls_no_code_that_only_a_server_names(section: str, kind: str, rules: str, trap: Trap, tmp_path: Path):
    server = Server(tmp_path, WORDS, **POLICIES[rules])
    mean = server.mean
    tree = json.loads(server.text)
    tree["data"]["classes"] = 10  # so that no site must look up another site's domain
    SECTIONS[section](tree)
    server.text = json.dumps(tree).replace(CALL, trap.call)
    records = {TRAIN: {MEAN: mean}, EVALUATE: {MODEL: mean}}.get(kind, {})
    server.reply(0, kind, records, sums={SITE: ONCE}, slot=SITE, split="test")
    assert not trap.proof.exists(), trap.proof.read_text()


@pytest.mark.parametrize("section", ["network", "network in a network", "own network", "one of own networks"])
def test_a_site_calls_the_code_that_its_owner_names(section: str, trap: Trap, tmp_path: Path):
    server = Server(tmp_path, WORDS, networks=f"mlp,exits,{trap.call}")
    tree = json.loads(server.text)
    SECTIONS[section](tree)
    server.text = json.dumps(tree).replace(CALL, trap.call)
    server.reply(0, ENROL)
    assert trap.proof.read_text() == "called"


def test_a_site_loads_only_what_its_owner_names_whatever_asks_for_it(trap: Trap, tmp_path: Path):
    """The last guard, below all checks of a configuration. It holds for the time of a message, and not in simulations."""
    server = Server(tmp_path, WORDS, networks=f"mlp,{trap.call}")
    asked = Message(RecordDict({ORDER: server.order(0, ENROL).record()}), 2, "query")
    real, simulated = (site_context(0, 1, "") for _ in range(2))
    real.node_config = {"site": "site-0000", "networks": f"mlp,{trap.call}"}
    for other in (f"{trap.name}:other", "an_entry_point", None, ["a"]):
        with moment(asked, real), pytest.raises(UserError, match="the site's owner does not allow it"):
            outside("network", other, [], "network.name")
    assert not trap.proof.exists()
    with moment(asked, real):
        assert callable(outside("network", trap.call, [], "network.name"))
    with moment(asked, simulated), pytest.raises(UserError, match="has no 'other'"):
        outside("network", f"{trap.name}:other", [], "network.name")
    with pytest.raises(UserError, match="has no 'other'"):
        outside("network", f"{trap.name}:other", [], "network.name")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[set[str]]:
    """The files and folders below `servers` that this process opens or lists."""
    seen, watching = set[str](), [True]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir") and str(tmp_path / "servers") in str(arguments[0]):
            seen.add(str(arguments[0]))

    sys.addaudithook(hear)  # Python cannot remove it
    yield seen
    watching.clear()


@pytest.mark.parametrize("domain", [CALL, "images:{}", "npz:{}/a.npz", "table:{}/a.csv"])
def test_a_site_with_its_own_data_opens_nothing_that_a_server_names(
    domain: str, trap: Trap, opened: set[str], tmp_path: Path
):
    """The domain in the server's configuration is a placeholder. The site does not look it up."""
    (folder := tmp_path / "servers").mkdir()
    (folder / "a.csv").write_text("a,b\n1,2\n")
    np.savez(folder / "a.npz", x=np.zeros((9, 8, 8), np.uint8), y=np.arange(9) % 3)
    opened.clear()
    server = Server(tmp_path, WORDS, domain="digits")
    tree = json.loads(server.text)
    tree["sites"] = [{"domain": domain.format(folder), "name": "site-0000"}]
    tree["data"]["classes"] = 10
    server.text = json.dumps(tree).replace(CALL, trap.call)
    reply = server.reply(0, ENROL)
    assert not reply.has_error(), reply.error
    assert reply.content.metric_records["metrics"]["samples"] == 1294
    assert not trap.proof.exists() and not opened


def test_a_server_chooses_among_the_networks_that_the_site_names(tmp_path: Path):
    for change in (at("sites.0.networks", [{"name": "lenet"}]), at("network", {"name": "exits", "of": "lenet"})):
        server = Server(tmp_path, WORDS, networks="mlp,exits")
        tree = json.loads(server.text)
        change(tree)
        server.text = json.dumps(tree)
        assert "RefusedError at " in str(server.reply(0, ENROL).error.reason)


@pytest.mark.parametrize("objective", [
    {"name": "layer_selection", "learner": {"name": "tf"}}, {"name": "layer_selection", "learner": "tf"},
    {"name": "layer_selection", "search": {"name": "exact"}}, {"name": "components", "auxiliary": ["rp"]},
])  # fmt: skip
def test_parts_of_objectives_that_ship_are_not_refused(objective: Tree):
    config = load("digits", [*WORDS[:3], f"objective={json.dumps(objective)}"])
    assert Policy(objectives=("layer_selection", "components")).apply(config, 0)


def test_a_run_has_one_objective_so_that_no_other_sends_what_the_site_does_not_share(tmp_path: Path):
    """Under `alone` nothing leaves. FedPer would send the extractor, and LG-FedAvg the head."""

    def words(mode: str) -> list[str]:
        return [*WORDS[:4], f"objective={{name: components, mode: {mode}}}", "strategy={name: head_transfer}",
                "training.rate=0.001", "training.steps=1"]  # fmt: skip

    server = Server(tmp_path, words("alone"), publish="none")
    assert not server.reply(0, TRAIN, sums={SITE: ONCE}, slot=SITE, round=5, rounds=9).has_error()
    for mode in ("fedper", "lg_fedavg"):
        server.change(*words(mode))
        shared = "extractor" if mode == "fedper" else "head"
        part = {MEAN: {name: tensor for name, tensor in server.mean.items() if name.startswith(shared)}}
        for number, base in ((1, 0), (6, 5)):
            reply = server.reply(0, TRAIN, part, sums={SITE: ONCE}, slot=SITE, round=number, base=base, rounds=9)
            assert "RefusedError at objective" in str(reply.error.reason), (mode, number)
    server.change(*words("alone"))
    assert not server.reply(0, TRAIN, sums={SITE: ONCE}, slot=SITE, round=6, base=5, rounds=9).has_error()


def test_a_question_takes_no_more_steps_than_the_site_allows_for_a_round(tmp_path: Path):
    """FedBABU fits the head before it is measured, for all of the run's epochs."""
    words = [*WORDS[:4], "objective={name: components, mode: fedbabu}", "strategy={name: components, mode: fedbabu}"]
    server = Server(tmp_path, words, max_steps=5)
    assert not server.reply(0, EVALUATE, {MODEL: server.mean}, split="test").has_error()
    server.change(*words, "training.epochs=4000")
    assert "training.epochs" in str(server.reply(0, EVALUATE, {MODEL: server.mean}, split="test").error.reason)
