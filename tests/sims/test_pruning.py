"""What is pruned from a run is what only going back needs, and a request that needs it says so."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.unlearning.certificate import read
from fedloom.sims.operations.simulate import simulate
from tests.server.ledgers import Plain, new, problems
from tests.sims.commands import ONE, SMALL, TWO, Command, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that can go back to any round."""
    root = tmp_path_factory.mktemp("history")
    simulate(load("digits", [*SMALL, "rounds=3", "federation.history=all", f"run.root={root}"]))
    return root / "digits"


def test_old_rounds_are_pruned_and_requests_are_as_exact_as_before(fedloom: Command, history: Path, tmp_path: Path):
    whole, pruned = (Path(shutil.copytree(history, tmp_path / name)) for name in ("whole", "pruned"))
    assert fedloom("unlearn", pruned, TWO, "--request-id", "r0", "--retrain").code == 0
    assert fedloom("unlearn", whole, TWO, "--request-id", "r0").code == 0
    assert fedloom("prune", pruned, "--older-than", "1h").out == "nothing to remove\n"
    said = fedloom("prune", pruned, "--older-than", "0h")
    assert "of rounds before 3: --rollback can no longer go back to these rounds" in said.out
    assert said.out.endswith("removed: retrained/r0: its certificate stays\n")
    assert fedloom("prune", pruned, "--older-than", "0h").out == "nothing to remove\n"
    assert problems(pruned) == [] and not list((pruned / "retrained").iterdir())
    certificates = []
    for run in (whole, pruned):
        assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
        certificates.append(read(run / "certificates" / "r1.json")["exact"])
        assert fedloom("verify", run / "certificates" / "r0.json", run).code == 0
    assert certificates[0] == certificates[1]


def test_a_request_that_needs_a_pruned_round_is_refused_with_the_reason(fedloom: Command, history: Path, tmp_path: Path):
    run = Path(shutil.copytree(history, tmp_path / "digits"))
    assert len(json.loads(fedloom("prune", run, "--older-than", "0h", "--json").out)["removed"]) == 1
    said = fedloom("unlearn", run, ONE, "--rollback", "--request-id", "r1")
    refused(said, "the state after round 2 is not stored (it was removed on 2", ", with all before round 3)")
    refused(fedloom("prune", run, "--older-than", "soon"), "--older-than: got 'soon', takes a number of days, such as 90d")


def test_a_configuration_limits_the_rounds_to_go_back_to(history: Path, tmp_path: Path):
    words = [*SMALL, "rounds=3", "federation.history=all", "federation.history_rounds=2", f"run.root={tmp_path}"]
    summary = simulate(load("digits", words))
    assert summary["digest"] == json.loads((history / "summary.json").read_text())["digest"]
    assert problems(tmp_path / "digits") == []
    with Ledger.open(tmp_path / "digits", server=False) as ledger:
        ledger.check_roll_back(1)
        with pytest.raises(
            UserError, match=r"after round 0 is not stored \(it was removed on .*, with all before round 1\)"
        ):
            ledger.check_roll_back(0)


def test_what_going_back_to_later_rounds_needs_stays(tmp_path: Path):
    """A site that last took part in an early round is in the sums of all later ones."""
    plain = Plain(keep="all")
    with new(tmp_path) as ledger:
        for sites in ("abcd", "ab", "ab", "ab", "ac"):
            plain.commit(ledger, sites)
        assert ledger.thin(3) == 3 + 3 + 3 * 2  # of a, of b, sums and states
        assert {site: [row.round for row in ledger.history(site)] for site in "abcd"} == {
            "a": [3, 4], "b": [3], "c": [0, 4], "d": [0]}  # fmt: skip
        for round in range(5):
            if round < 3:
                with pytest.raises(UserError, match="was removed"):
                    ledger.check_roll_back(round)
            else:
                ledger.check_roll_back(round)
        assert ledger.thin(3) == 0 and ledger.thin(99) > 0
        last = ledger.last_round()
        assert last is not None and last.states and dataclasses.asdict(last)["round"] == 4
    assert problems(tmp_path) == []
