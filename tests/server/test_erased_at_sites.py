"""A request reaches the site itself: its node deletes what it keeps, and until it has said so the request is outstanding."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import METRICS
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.work import answer, identify
from fedloom.conf import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.client_erasure import Erasure, at_sites, outstanding
from fedloom.server.unlearning.requests import receive
from fedloom.server.unlearning.verification import verify
from fedloom.sims.report.certificates import write_html
from tests.server.parts import Recorder, one_thread, small
from tests.server.test_enrolment import NAMES, A, B, C, Nodes


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Nodes]:
    """A finished run of two sites that joined as nodes do."""
    one_thread()
    config = small(tmp_path, NAMES, "rounds=1", "engine.name=flower", "baselines=[fedavg]")
    grid = Nodes(config, {A: "north", B: "south"})
    grid.store = str(tmp_path / "elsewhere")  # as on another machine
    run_experiment(grid, config, LogListener())
    return config, grid


def test_a_resume_that_does_not_reach_a_node_says_what_is_outstanding(run: tuple[Config, Nodes]):
    config, grid = run
    path, listener = Path(config.run.root) / config.run.name, Recorder()
    with Ledger.open(path) as ledger:
        receive(ledger, "gone", ["south"], "", {})
    again = replace(config, rounds=2, run=replace(config.run, resume=True))
    grid.alive = [A]
    run_experiment(grid, again, listener)
    line = f"outstanding: nodes of south have not deleted their data yet; 'fedloom resume {path}' asks them again"
    assert listener.messages[-1] == line
    grid.alive = [A, B]
    run_experiment(grid, replace(again, rounds=3), listener)
    assert listener.messages.count(line) == 1


@pytest.mark.parametrize("name", ["files", "bytes"])
@pytest.mark.parametrize("number", [2**53, 2**63 - 1, 9e29, -1, 0.5, float("nan")])
def test_a_node_that_says_it_deleted_an_impossible_number_has_not_answered(
    run: tuple[Config, Nodes], name: str, number: float
):
    """The largest of these cannot stand in a certificate, so it must not enter the ledger."""
    config, grid = run
    path, lines = Path(config.run.root) / config.run.name, list[str]()

    def lie(message: Message, context: Context) -> Message:
        reply = answer(message, context)
        reply.content[METRICS] = MetricRecord({"files": 1, "bytes": 1, name: number})
        return reply

    with Ledger.open(path) as ledger:
        method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config))
        method.erasure = Erasure(config, ledger, grid, lines.append)
        liar = ClientApp()
        liar.query()(identify)
        liar.query("ask")(lie)
        honest, grid._app = grid._app, liar
        receive(ledger, "gone", ["south"], "", {})
        method.unlearning().take(lines.append)
        certificate = path / "certificates" / "gone.json"
        assert json.loads(certificate.read_text())["at_sites"] == {"south": None}
        assert outstanding(ledger) == {"south": "gone"}
        assert any("south: its answer does not say what it deleted" in line for line in lines)
        grid._app = honest
        method.unlearning().tell_sites()
        assert not outstanding(ledger) and json.loads(certificate.read_text())["at_sites"]["south"]


def test_a_node_that_is_gone_is_reported_when_it_comes_and_the_certificate_says_so(run: tuple[Config, Nodes]):
    config, grid = run
    path, lines = Path(config.run.root) / config.run.name, list[str]()
    with Ledger.open(path) as ledger:
        method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config))
        method.erasure = Erasure(config, ledger, grid, lines.append)
        kept = SiteStore(Path(grid.store), ledger.run().run, "south")
        assert kept.rounds() and not outstanding(ledger)
        receive(ledger, "gone", ["south"], "", {})
        grid.alive = [A]
        method.unlearning().take(lines.append)
        assert outstanding(ledger) == {"south": "gone"} and kept.rounds()
        certificate = path / "certificates" / "gone.json"
        assert json.loads(certificate.read_text())["at_sites"] == {"south": None}
        assert "outstanding" in write_html(certificate).read_text()
        verdicts = {finding.what: finding.verdict for finding in verify(certificate, ledger)}
        assert verdicts["south says that it deleted its own store"] == "outstanding"
        # another node that says it is the site is not asked: it has nothing of it
        grid.names[C], grid.alive = "south", [A, C]
        method.unlearning().tell_sites()
        assert outstanding(ledger) and kept.rounds()
        grid.alive = [A, B]
        method.unlearning().tell_sites()
        assert not outstanding(ledger) and not kept.folder.exists()
        assert SiteStore(Path(grid.store), ledger.run().run, "north").rounds()
        done = json.loads(certificate.read_text())["at_sites"]["south"]
        assert done["files"] >= 1 and done["bytes"] > 0 and done == at_sites(ledger, "gone", ["south"])["south"]
        findings = verify(certificate, ledger)
        assert all(finding.verdict == "match" for finding in findings), findings
    assert any("south: deleted its store of the run" in line for line in lines)
