"""The published figures: the file, its bands, the tables in Markdown, and figures that are measured again."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.conf.errors import FailedError, UserError
from fedloom.sims import experiments
from fedloom.sims.experiments import figures
from fedloom.sims.experiments.check import _value
from fedloom.sims.experiments.figures import Figure, Measurement
from tests.sims.commands import Command, refused

HOME = Path(__file__).parents[2]
RUN = "fedloom run hospitals rounds=1 engine.name=inline --seeds 0,1"
REPRODUCE = "fedloom reproduce strategies --preset embedded --seeds 2 tables=fedavg rounds=2 engine.name=inline"
ENTRY = """
tiny:
  heading: network
  measured:
    - command: {command}
      commit: abcdef0
      date: 2026-11-26
      machine: 2 CPU cores
      minutes: {minutes}
      data: {data}
      figures:
        - {figure}
"""
ROW = "[FedAvg, test, accuracy / fedavg / union, 90.0, 1.0]"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the file by one with these figures of a command."""

    def put(figure: str = ROW, command: str = RUN, minutes: object = 1, data: object = "false", rest: str = "") -> None:
        path = tmp_path / "figures.yaml"
        text = ENTRY.format(command=command, minutes=minutes, data=data, figure=figure)
        path.write_text(text + rest, encoding="utf-8")
        monkeypatch.setattr(figures, "FILE", str(path))

    return put


def made(mean: float, deviation: float, seeds: int, unit: str = "percent") -> tuple[Measurement, Figure]:
    figure, command = Figure("a", "b", "c", mean, deviation), f"fedloom reproduce x --seeds {seeds}"
    return Measurement("t", "h", command, "c", "d", "m", 1.0, (figure,), unit=unit), figure


@given(st.floats(-100, 100), st.floats(0, 50), st.integers(2, 50), st.floats(0, 60))
def test_a_mean_is_inside_up_to_two_standard_errors_of_a_difference_or_half_a_point(mean, deviation, seeds, distance):
    each, figure = made(mean, deviation, seeds)
    error = math.hypot(deviation / math.sqrt(seeds), deviation / math.sqrt(seeds))
    limit = max(2 * error, 0.5)
    assert math.isclose(each.tolerance(figure), limit)
    for new in (mean - distance, mean + distance):
        if not math.isclose(distance, limit, abs_tol=1e-9):
            assert each.inside(figure, new) == (distance < limit)


def test_the_least_band_of_a_number_is_one_per_cent_of_it():
    each, figure = made(0.997, 0.0009, 5, figures.NUMBER)
    assert each.inside(figure, 0.988) and not each.inside(figure, 0.986)


def test_the_shipped_file_is_sound_and_no_figure_is_of_one_seed():
    every = figures.measurements()
    assert all(each.seeds >= 2 and each.figures for each in every)
    assert sum(not each.data and each.minutes <= 5 for each in every) >= 5


def test_rows_and_columns_of_reproductions_are_those_that_the_code_has():
    for each in figures.measurements():
        if each.words[0] == "reproduce":
            folder, name = Path(experiments.__file__).parent, each.words[1]
            rules = [folder / "comparators/__init__.py"] if name == "fusion" else []
            files = [*folder.glob(f"{name}.py"), *folder.glob(f"{name}_*.py"), *folder.glob(f"{name}/*.py"), *rules]
            source = "".join(file.read_text(encoding="utf-8") for file in files)
            names = {name for figure in each.figures for name in figure.metric.split(" / ")[1:]}
            assert sorted(name for name in names if f'"{name}"' not in source) == []


@pytest.mark.parametrize("name", figures.WRITTEN)
def test_tables_in_markdown_equal_the_file(name: str):
    text, every = (HOME / name).read_text(encoding="utf-8"), figures.measurements()
    assert "<!-- figures: " in text
    assert figures.with_figures(text, every) == text, "run `fedloom results --write`"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"figure": "[FedAvg, test, accuracy, ten, 1.0]"}, ["figure 1", "mean must be a number, not 'ten'"]),
        ({"figure": "[FedAvg, test, accuracy, 10.0, -1.0]"}, ["figure 1", "deviation must be finite and at least 0"]),
        ({"figure": "[FedAvg, test, accuracy, .nan, 1.0]"}, ["figure 1", "mean must be finite"]),
        ({"figure": "[FedAvg, test]"}, ["figure 1", "takes [row, column, metric, mean, deviation]"]),
        ({"figure": f"{ROW}\n        - {ROW}"}, ["'FedAvg, test' is there 2 times"]),
        ({"command": "fedloom run hospitals --seeds 0"}, ["command must be", "at least two"]),
        ({"command": "fedloom reproduce lasem --seeds two"}, ["command must be"]),
        ({"command": "rm --seeds 0,1"}, ["command must be"]),
        ({"minutes": "long"}, ["minutes must be a number, not 'long'"]),
        ({"data": "maybe"}, ["data must be true or false, not 'maybe'"]),
        ({"data": "true\n      dato: 1"}, ["unknown key", "'dato'", "did you mean 'date'"]),
        ({"data": "true\n      unit: metres"}, ["unit must be percent or number, not 'metres'"]),
        ({"rest": "other: 3"}, ["needs `heading` and a list `measured`"]),
        ({"rest": "other: ["}, ["needs `heading` and a list `measured`"]),
    ],
)
def test_a_bad_row_is_one_clear_line(fedloom: Command, published, changed: dict, message: list[str]):
    published(**changed)
    refused(fedloom("results"), "figures.yaml", *message)


def test_a_table_is_written_between_its_marks(published):
    published()
    every, text = figures.measurements(), "a\n<!-- figures: tiny -->\nold\n<!-- end -->\nb\n"
    new = figures.with_figures(text, every)
    assert "| FedAvg | 90.0 ± 1.0 |" in new and "over 2 seeds" in new and "old" not in new
    assert new.startswith("a\n") and new.endswith("<!-- end -->\nb\n") and figures.with_figures(new, every) == new
    with pytest.raises(UserError, match="end"):
        figures.with_figures(f"<!-- figures: tiny -->\n{text}", every)
    with pytest.raises(UserError, match="unknown table 'tony'"):
        figures.with_figures(text.replace("tiny", "tony"), every)


def test_the_list_has_the_band_and_the_command(fedloom: Command, published):
    published()
    said = fedloom("results", "tiny")
    assert said.code == 0 and f"| 90.0 ± 1.0 | ± 2.0 | 2 | 2026-11-26 | abcdef0 | 1 | {RUN} |" in said.out
    refused(fedloom("results", "tinny"), "unknown table 'tinny'", "did you mean 'tiny'")


def test_what_cannot_be_measured_is_skipped_with_the_reason(
    fedloom: Command, published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "none"))
    published(data="true")
    said = fedloom("results", "--check")
    assert said.code == 0 and "skipped: needs a data folder (FEDLOOM_DATA)" in said.out and "1 skipped" in said.out
    published(minutes=6)
    assert "skipped: takes 6 minutes" in fedloom("results", "--check").out


@pytest.mark.slow
def test_a_run_is_measured_again_inside_and_outside_its_band(fedloom: Command, published):
    published(f"{ROW}\n        - [FedAvg, far, accuracy / fedavg / union, 20.0, 1.0]")
    said = fedloom("results", "--check", "tiny")
    assert said.code == 1, said
    command, verdicts = said.err.splitlines()
    assert command == RUN and re.fullmatch(r"  (1 inside, 1|2) OUTSIDE \(\d+ s\)", verdicts)
    far = next(line for line in said.out.splitlines() if "FedAvg, far" in line)
    again = far.split("|")[4].strip()
    assert far.rstrip(" |").endswith("OUTSIDE")
    mean, deviation = again.split(" ± ")
    published(f"[FedAvg, test, accuracy / fedavg / union, {mean}, {deviation}]")
    said = fedloom("results", "--check")
    assert said.code == 0 and f"| {again} |" in said.out and "1 inside" in said.out


@pytest.mark.slow
def test_a_reproduction_is_measured_again_by_its_own_command(fedloom: Command, published):
    path = "The standard methods on mnist_dirichlet / FedAvg / all rounds, test"
    published(f'[FedAvg, test, "{path}", 99.0, 0.1]', REPRODUCE)
    said = fedloom("reproduce", "strategies", "--check")
    assert said.code == 1 and "OUTSIDE" in said.out and "FAILED" not in said.out, said
    refused(fedloom("reproduce", "lasem", "--check"), "no figures of the reproduction 'lasem'")
    refused(fedloom("reproduce", "strategies", "rounds=1", "--check"), "--check", "leave out overrides")


def test_a_command_or_a_metric_that_fails_is_named(fedloom: Command, published):
    published(command="fedloom run hospitals rounds=none --seeds 0,1")
    said = fedloom("results", "--check")
    assert said.code == 1 and "FAILED: fedloom:" in said.out and "rounds" in said.out
    each, _ = made(1.0, 1.0, 2)
    with pytest.raises(FailedError, match="no number at 'accuracy / sum'"):
        _value([{"accuracy": {}}], Figure("a", "b", "accuracy / sum", 1.0, 1.0), each)
    with pytest.raises(FailedError, match="no number at 't / a'"):
        _value({"t": {"a": {"b": "1.0"}}}, Figure("a", "b", "t / a", 1.0, 1.0), each)
    assert _value([{"a": [0.5, 0.25]}, {"a": [0.5, 0.75]}], Figure("a", "b", "a / 1", 1.0, 1.0), each).mean == 50.0
