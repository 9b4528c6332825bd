"""metrics.jsonl is read again only from where it was appended to, and wholly after any other change."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedloom.server.run_folder import metrics_file
from fedloom.server.run_folder.metrics_file import read_metrics


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(metrics_file, "LEAST_REMEMBERED", 0)
    return tmp_path / "metrics.jsonl"


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def appended(file: Path, text: str) -> None:
    with file.open("a") as content:
        content.write(text)


def test_only_what_was_appended_is_parsed(file: Path, monkeypatch: pytest.MonkeyPatch):
    parsed: list[str] = []
    reads = metrics_file.read_json
    monkeypatch.setattr(metrics_file, "read_json", lambda line: (parsed.append(line), reads(line))[1])
    file.write_text(lines({"round": 1, "loss": 3.0}, {"round": 2, "loss": 2.0}))
    assert list(read_metrics(file.parent)) == [1, 2] and len(parsed) == 2
    assert list(read_metrics(file.parent)) == [1, 2] and len(parsed) == 2
    appended(file, '{"round": 3, "lo')  # a torn line, which a writer completes later
    assert list(read_metrics(file.parent)) == [1, 2]
    appended(file, 'ss": 1.0}\n')
    assert read_metrics(file.parent)[3] == {"round": 3, "loss": 1.0}
    assert [line for line in parsed if line.startswith('{"round": 1')] == ['{"round": 1, "loss": 3.0}']


def test_a_reader_may_change_what_it_gets(file: Path):
    file.write_text(lines({"round": 1, "loss": 3.0}))
    del read_metrics(file.parent)[1]["loss"]
    read_metrics(file.parent).clear()
    assert read_metrics(file.parent) == {1: {"round": 1, "loss": 3.0}}


def test_a_file_that_was_changed_or_replaced_is_read_anew(file: Path):
    first, other = lines({"round": 1, "loss": 3.0}, {"round": 2, "loss": 2.0}), lines({"round": 1, "loss": 9.0})
    file.write_text(first)
    assert len(read_metrics(file.parent)) == 2
    file.write_text(other)  # shorter
    assert read_metrics(file.parent) == {1: {"round": 1, "loss": 9.0}}
    file.write_text(other.replace("9.0", "8.0"))  # as long, in place
    os.utime(file, ns=(1, 1))
    assert read_metrics(file.parent)[1]["loss"] == 8.0
    file.write_text(first.replace("3.0", "7.0") + lines({"round": 3}))  # longer, and not an extension
    assert [record.get("loss") for record in read_metrics(file.parent).values()] == [7.0, 2.0, None]
    (file.parent / "new").write_text(lines({"round": 5}) * 9)
    os.replace(file.parent / "new", file)
    assert list(read_metrics(file.parent)) == [5]
    file.unlink()
    assert read_metrics(file.parent) == {}


def test_few_files_are_remembered(file: Path):
    for number in range(2 * metrics_file.MOST_REMEMBERED):
        (file.parent / str(number)).mkdir()
        (file.parent / str(number) / file.name).write_text(lines({"round": 1}))
        read_metrics(file.parent / str(number))
    assert len(metrics_file._READ) <= metrics_file.MOST_REMEMBERED
