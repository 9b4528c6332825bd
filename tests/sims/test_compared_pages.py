"""The file `compared.json` next to comparison pages, by which requests name the pages that show their run."""

import json
import shutil
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.sims.comparison import compare
from fedloom.sims.report.compared import pages_near
from tests.sims.commands import ONE, TWO, Command

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def other(finished_run: Path, run: Path) -> Path:
    """A run with another seed; of equal runs, one is left out."""
    other = Path(shutil.copytree(finished_run, run.with_name("other")))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 7", 1))
    return other


def test_a_request_names_the_pages_that_show_its_run(
    fedloom: Command, run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run.parent)
    for page, runs in {"both.html": [run, other], "mine.html": [run.name], "other.html": [other]}.items():
        assert fedloom("compare", *runs, "--html", page).code == 0
    notes = run.parent / "compared.json"
    assert notes.stat().st_mode & 0o777 == 0o600
    assert json.loads(notes.read_bytes()) == {
        "both.html": sorted([str(run), str(other)]), "mine.html": [str(run)], "other.html": [str(other)]}  # fmt: skip
    said = fedloom("unlearn", run, ONE)
    assert "Comparison pages written before (both.html, mine.html) still show the earlier results" in said.out
    Path("both.html").unlink()
    assert fedloom("compare", run, "--html", "mine.html").code == 0
    assert sorted(json.loads(notes.read_bytes())) == ["mine.html", "other.html"]
    Path("mine.html").unlink()
    said = fedloom("unlearn", run, TWO)
    assert said.out.strip().endswith(". If a comparison page in another folder shows this run, write the page again.")


def test_without_pages_a_request_does_not_say_that_there_are_some(fedloom: Command, run: Path):
    said = fedloom("unlearn", run, ONE)
    assert "still show" not in said.out
    assert said.out.strip().endswith(". If a comparison page in another folder shows this run, write the page again.")
    (run / "csv").mkdir()
    said = fedloom("unlearn", run, TWO)
    assert f". Trackers' records ({run / 'csv'}) still show the earlier results: delete the records. If a " in said.out


def test_pages_of_other_runs_are_not_named_and_those_without_a_note_are_as_before(run: Path, other: Path):
    compare(other).write(run.parent / "other.html")
    assert pages_near(run) == ([], True) and pages_near(other) == ([run.parent / "other.html"], True)
    (run.parent / "old.html").write_text("a page of an earlier version")
    assert pages_near(run) == ([], False)
    (run.parent / "old.html").unlink()
    other.rename(other.with_name("moved"))
    assert pages_near(run) == ([], False)
    assert pages_near(other.with_name("moved")) == ([], False)


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", '{"other.html": 5}', '{"other.html": [1]}', "\ud800"])
def test_a_damaged_note_counts_as_missing(run: Path, other: Path, content: str):
    page = compare(other).write(run.parent / "other.html")
    page.with_name("compared.json").write_text(content, errors="surrogatepass")
    assert pages_near(other) == ([], False)
    compare(other).write(page)
    assert pages_near(other) == ([page], True)


def test_a_note_that_cannot_be_written_is_a_line(run: Path, tmp_path: Path):
    (tmp_path / "pages" / "compared.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"compared\.json: cannot be written \(Is a directory\)"):
        compare(run).write(tmp_path / "pages" / "page.html")
