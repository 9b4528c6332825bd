"""Runs that earlier versions have left are read, checked, gone on with, unlearned from and verified.

formats/N is a run whose ledger is of format N: four sites of digits, stopped after two of three rounds, site-0003 forgotten.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.conf import UserError, load, to_yaml
from fedloom.conf.loading import VERSION
from fedloom.conf.package import copy_package
from fedloom.server.ledger import Contribution, Ledger
from fedloom.server.ledger.tables import FORMAT, OLDEST
from fedloom.server.run_folder.folder import CONFIG, RunFolder, holds, read_config, refuse_existing
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.operations.ledger import audit
from fedloom.sims.operations.simulate import absolute_paths, resume
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.operations.verify import verify_certificate
from fedloom.sims.report.report import write_report
from tests.server.ledgers import contents, new, problems
from tests.server.parts import small

FORMATS = Path(__file__).parent / "formats"
REPOSITORY = Path(__file__).parents[2]
TOMORROW = """
import sys
from pathlib import Path
from fedloom.conf.schema import Config
from fedloom.sims.report.report import write_report
from fedloom.sims.operations.ledger import audit
from fedloom.sims.operations.simulate import resume
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.operations.verify import verify_certificate

run = Path(sys.argv[1])
assert Config.__dataclass_fields__["novelty"].default == 3
assert audit(run)["ok"]
assert resume(run)["status"] == "finished"
unlearn(run, UnlearningRequest(["site-0001"], "later"))
assert verify_certificate(run / "certificates" / "later.json", run)[1]
assert audit(run)["ok"]
write_report(run)
"""


@pytest.fixture(params=sorted(path.name for path in FORMATS.iterdir()))
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a run that was left in one of the formats."""
    return shutil.copytree(FORMATS / request.param, tmp_path / "runs" / request.param)


def without_version(text: str) -> str:
    return re.sub(r"^version: \d+$", "", text, flags=re.MULTILINE)


def last_round(run: Path) -> int:
    with Ledger.open(run, server=False) as ledger:
        last = ledger.last_round()
    assert last is not None
    return last.round


def test_each_format_that_is_read_has_its_run():
    assert sorted(path.name for path in FORMATS.iterdir()) == [str(one) for one in range(OLDEST, FORMAT + 1)]
    assert sum(path.stat().st_size for path in FORMATS.rglob("*")) < 600_000


def test_an_older_run_is_read_checked_and_verified_and_nothing_in_it_changes(left: Path):
    before = contents(left)
    with Ledger.open(left, server=False) as ledger:
        assert str(ledger.run().format) == left.name
        assert [site for site, gone in ledger.sites().items() if gone] == ["site-0003"]
        assert [one.round for one in ledger.history("site-0001")] == [0, 1, 2]
    assert audit(left) == {"ok": True, "digest": audit(left)["digest"], "problems": [], "notes": []}
    table, good = verify_certificate(left / "certificates" / "before.json", left)
    assert good, table
    assert contents(left) == before
    assert "site-0003" in write_report(left).read_text()


def test_an_older_run_is_gone_on_with_and_unlearned_from(left: Path):
    summary = resume(left)
    assert (summary["status"], last_round(left)) == ("finished", 3)
    assert audit(left)["ok"]
    _, done = unlearn(left, UnlearningRequest(["site-0001"], "now", "asked", repair=1))
    assert done["sites"] == ["site-0001"]
    assert last_round(left) == 4
    found = audit(left)
    assert found["ok"] and found["notes"] == []
    for name in ("before", "now"):
        table, good = verify_certificate(left / "certificates" / f"{name}.json", left)
        assert good, table
    with Ledger.open(left, server=False) as ledger:
        assert str(ledger.run().format) == left.name  # as it was begun


def test_an_older_run_is_rolled_back(left: Path):
    """What a rollback takes from the rows, indexed or not, goes from the blobs."""
    with Ledger.open(left) as ledger:
        last = ledger.last_round()
        assert last is not None
        gave = {"site-0000": Contribution(last.states["sum"], 1, 3, 32)}
        ledger.commit_round(3, gave, last.states, last.digest, {}, "all")
        before = ledger.blobs.names()
        ledger.roll_back(2, ["site-0000"])
        assert ledger.blobs.names() == before
    assert audit(left)["ok"]


def test_an_older_run_of_the_same_configuration_is_not_run_again(left: Path):
    config = read_config(left)
    resume(left)
    before = contents(left)
    assert holds(left, absolute_paths(with_default_objective(config)))
    assert resume(left)["status"] == "finished"
    assert contents(left) == before


def test_a_later_run_is_refused_in_one_line(left: Path):
    text = (left / CONFIG).read_text()
    (left / CONFIG).write_text(f"version: 99\nnovelty: 3\n{without_version(text)}")
    with pytest.raises(
        UserError, match=rf"config\.yaml: version: got 99, this fedloom reads up to {VERSION}; use the .*wrote"
    ):
        read_config(left)


def test_a_later_ledger_is_refused_in_one_line_and_so_is_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedloom.server.ledger.ledger.FORMAT", 99)  # as a later fedloom would write it
    new(tmp_path).close()
    monkeypatch.undo()
    message = f"has format 99, but this fedloom reads {OLDEST} to {FORMAT}; use the fedloom that wrote it"
    for server in (True, False):
        with pytest.raises(UserError, match=message):
            Ledger.open(tmp_path, server=server)
    assert [problem.what for problem in problems(tmp_path)] == [message]


@pytest.mark.parametrize("gone", ["experiment", "sites", "run", "evaluation"])
def test_a_folder_whose_configuration_is_not_ours_is_never_deleted(tmp_path: Path, gone: str):
    folder = tmp_path / "digits"
    folder.mkdir()
    lines = to_yaml(small(tmp_path)).replace(f"\n{gone}:", "\nother:")
    (folder / CONFIG).write_text(lines)
    with pytest.raises(UserError, match=r"digits is not a run of fedloom"):
        refuse_existing(small(tmp_path, "run.overwrite=true"))


def test_a_run_of_any_version_may_be_overwritten(left: Path):
    words = [f"run.root={left.parent}", f"run.name={left.name}", "run.overwrite=true"]
    refuse_existing(load("digits", words))
    (left / CONFIG).write_text(f"version: 99\nnovelty: 3\n{without_version((left / CONFIG).read_text())}")
    RunFolder(left).open(load("digits", words))
    assert not (left / "ledger.sqlite").exists()


@pytest.mark.parametrize("left", [str(OLDEST)], indirect=True)
def test_a_run_lives_on_when_a_key_of_the_configuration_is_added(left: Path, tmp_path: Path):
    """By a fedloom whose configuration has one more key at the top, and one in a section."""
    later = tmp_path / "later"
    later.mkdir()
    schema_file = copy_package(later) / "conf" / "schema.py"
    schema = schema_file.read_text()
    schema = schema.replace(
        "class EngineConfig:\n", 'class EngineConfig:\n    novelty: bool = option(True, "comes later")\n'
    )
    schema_file.write_text(schema + '    novelty: int = option(3, "comes later")\n')
    paths = os.pathsep.join([str(later), str(REPOSITORY)])
    words, env = [sys.executable, "-c", TOMORROW, str(left)], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(words, env=env, cwd=tmp_path, text=True, capture_output=True)
    assert not done.returncode, done.stderr
