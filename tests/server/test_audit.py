"""Checking a ledger: every byte counts, the file at fault is named, and looking changes nothing."""

import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Contribution, Ledger
from fedloom.server.ledger.audit import Problem, check
from fedloom.server.ledger.blobs import file_digest
from fedloom.server.ledger.tables import link
from fedloom.server.run_folder.listing import waiting
from tests.server.ledgers import SITES, Plain, closed, contents, new, problems

FINISHED = ("summary.json", "states/aggregate.safetensors")


def finished(folder: Path, keep: str = "latest") -> Plain:
    """A closed ledger of a run that ended with some files, after a request was applied."""
    plain = closed(folder, keep=keep)
    for name in FINISHED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"the content of {name}")
    with Ledger.open(folder) as ledger:
        ledger.receive("r1", "forget", ["d"], "asked", {})
        plain.forget(ledger, ["d"], "r1")
        ledger.note("finished", {"files": {name: file_digest(folder / name) for name in FINISHED}})
    return plain


def flipped(path: Path, place: int, mask: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


def tampered(folder: Path, *statements: str) -> None:
    """Change the file as somebody would who knows SQLite."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        for statement in statements:
            db.execute(statement)
    db.close()
    (folder / "ledger.sha256").unlink()


@pytest.mark.parametrize("keep", ["latest", "all"])
def test_a_whole_ledger_has_no_problems_and_is_left_as_it_was(tmp_path: Path, keep):
    finished(tmp_path, keep)
    before = contents(tmp_path)
    assert check(tmp_path) == []
    assert contents(tmp_path) == before


def test_any_flipped_byte_of_any_file_is_found_in_that_file(tmp_path: Path):
    finished(tmp_path)
    draw = random.Random(0)
    names = sorted(name for name in contents(tmp_path) if name != "ledger.lock")
    assert {"ledger.sqlite", "ledger.sha256", "config.yaml", *FINISHED} < set(names)
    for name in names:
        path = tmp_path / name
        size = path.stat().st_size
        for place in {0, size - 1, *(draw.randrange(size) for _ in range(40 if name == "ledger.sqlite" else 15))}:
            mask = draw.randrange(1, 256)
            flipped(path, place, mask)
            before = contents(tmp_path)
            found = check(tmp_path)
            named = {problem.file for problem in found} | {word for problem in found for word in problem.what.split()}
            assert any(name in (word, word.rstrip(":")) for word in named), (name, place, mask, found)
            assert contents(tmp_path) == before
            flipped(path, place, mask)
        assert check(tmp_path) == []


def test_damage_to_a_ledger_without_a_seal_is_never_a_traceback_and_changes_nothing(tmp_path: Path):
    finished(tmp_path)
    (tmp_path / "ledger.sha256").unlink()
    path, draw = tmp_path / "ledger.sqlite", random.Random(1)
    whole = path.read_bytes()
    places = [*range(100), *(draw.randrange(len(whole)) for _ in range(60))]
    damaged = [whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :] for place in places]
    damaged += [whole[:length] for length in (0, 1, 16, 99, 100, 4096, 5000, len(whole) // 2, len(whole) - 1)]
    for content in [*damaged, b"\0" * len(whole), whole[::-1], whole + whole]:
        path.write_bytes(content)
        for problem in check(tmp_path):
            assert isinstance(problem, Problem)
            assert "\n" not in problem.what
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 99)]
)
def test_files_that_are_gone_empty_or_rubbish_are_named(tmp_path: Path, change: Callable[[Path], object]):
    finished(tmp_path)
    for name, content in contents(tmp_path).items():
        if name != "ledger.sha256":
            change(tmp_path / name)
            found = check(tmp_path)
            assert any(problem.severity == "problem" and name in f"{problem.file} {problem.what}" for problem in found), name
            (tmp_path / name).write_bytes(content)
            assert check(tmp_path) == []
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    assert [problem.file for problem in check(tmp_path)] == ["config.yaml"]


def test_a_folder_without_a_ledger_has_one_problem(tmp_path: Path):
    assert check(tmp_path) == check(tmp_path / "none") == [Problem("ledger.sqlite", "is missing")]


def changed_event(id: int) -> tuple[str, ...]:
    return ("DROP TRIGGER events_stay", f"""UPDATE events SET body = replace(body, ':', ': ') WHERE id = {id}""")


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (changed_event(3), r"event 3 \('round'\) does not match its digest"),
        (changed_event(1), r"event 1 \('created'\) does not match its digest"),
        (("DROP TRIGGER events_last", "DELETE FROM events WHERE id = 2"), "event 2 is missing"),
        (("DROP TRIGGER events_last", "DELETE FROM events"), "has no events"),
        (("DROP TRIGGER events_last", "DELETE FROM events WHERE kind = 'finished'"), "'sqlite_master': row"),
        (("DROP TRIGGER events_stay", "UPDATE events SET previous = digest WHERE id = 4"), "event 4 .* does not follow"),
        (
            ("UPDATE contributions SET samples = 11 WHERE site = 'b'",),
            r"'contributions': row \('b', 2\) does not follow from the events",
        ),
        (("DELETE FROM contributions WHERE site = 'c'",), r"'contributions': row \('c', 0\)"),
        (("UPDATE runs SET config = 'x'",), r"'runs': row \(1, 'digits'\)"),
        (("UPDATE rounds SET record = NULL WHERE round = 1",), r"'rounds': row \(1, "),
        (("UPDATE sites SET forgotten = 0",), r"'sites': row \('d', 3\)"),
        (("UPDATE requests SET state = 'verified'",), r"'requests': row \('r1', 'forget'\)"),
        (("PRAGMA foreign_keys=OFF", "DELETE FROM rounds WHERE round = 0"), "'contributions': row .* missing in 'rounds'"),
    ],
)
def test_rows_and_events_that_were_tampered_with_are_named(tmp_path: Path, statements, message):
    finished(tmp_path)
    tampered(tmp_path, *statements)
    found = check(tmp_path)
    assert {problem.file for problem in found} == {"ledger.sqlite"}
    assert re.search(message, found[0].what)


def test_a_chained_event_that_cannot_be_replayed_and_an_odd_finish_are_problems(tmp_path: Path):
    finished(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        ledger.note("finished", {"files": ["not", "a", "dict"]})
        assert [problem.file for problem in check(tmp_path)] == ["ledger.sqlite"]
        *_, last = ledger.events()
    row = (last.id + 1, last.time, "round", "{}", last.digest, link(last.digest, last.id + 1, last.time, "round", "{}"))
    tampered(tmp_path, f"INSERT INTO events VALUES {row}")
    assert [problem.what for problem in check(tmp_path)] == [f"event {row[0]} ('round') cannot be replayed ('round')"]


def committed(folder: Path, total: dict[str, torch.Tensor], *contributions: dict[str, torch.Tensor]) -> list[Problem]:
    with new(folder) as ledger:
        gave = {
            site: Contribution(ledger.blobs.put(state), 1, 0, 32) for site, state in zip(SITES, contributions, strict=False)
        }
        ledger.commit_round(0, gave, {"sum": ledger.blobs.put(total)}, {}, None, "latest")
    return check(folder)


def test_the_stored_sum_must_be_the_sum_to_the_last_bit(tmp_path: Path):
    one, two = {"w": torch.tensor([2**60, -3]), "x": torch.ones(1)}, {"w": torch.tensor([2**60 - 1, 4])}
    right = torch.tensor([2**61 - 1, 1])
    assert committed(tmp_path / "right", {"w": right}, one, two) == []
    assert committed(tmp_path / "none", {"w": torch.zeros(2, dtype=torch.int64)}) == []
    (wrong,) = committed(tmp_path / "wrong", {"w": right + torch.tensor([1, 0])}, one, two)
    assert re.fullmatch(r"blobs/[0-9a-f]{64}\.safetensors", wrong.file)
    assert wrong.what == "is not the sum of the latest contributions (tensor 'w')"
    (other,) = committed(tmp_path / "float", {"w": right.double()}, one, two)
    assert other.what == wrong.what
    (absent,) = committed(tmp_path / "absent", {"w": right, "x": torch.ones(1, dtype=torch.int64)}, two, two)
    assert "a's contribution lacks the sum's tensor 'x'" in absent.what
    big = {"w": torch.full((2,), 2**62)}
    (overflow,) = committed(tmp_path / "overflow", {"w": right}, big, big, big)
    assert overflow.what == wrong.what


def test_orphans_and_strangers_are_notes_and_missing_blobs_problems(tmp_path: Path):
    closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        orphan = ledger.blobs.put({"x": torch.ones(1)})
        lost = ledger.all_latest()["c"].blob
        ledger.blobs.remove(lost)
    (tmp_path / "blobs" / ".tmp-1-1").write_bytes(b"")
    assert {(problem.file, problem.severity) for problem in check(tmp_path)} == {
        (f"blobs/{orphan}.safetensors", "note"),
        ("blobs/.tmp-1-1", "note"),
        (f"blobs/{lost}.safetensors", "problem"),
    }


def test_the_files_of_the_last_finish_count_until_the_run_is_resumed(tmp_path: Path):
    finished(tmp_path)
    (tmp_path / FINISHED[0]).write_text("changed")
    (tmp_path / FINISHED[1]).unlink()
    assert {problem.file: problem.what.split(":")[0] for problem in check(tmp_path)} == {
        FINISHED[0]: "was changed after the run finished",
        FINISHED[1]: "is missing",
    }
    with Ledger.open(tmp_path) as ledger:
        ledger.note("resumed", {})
        assert check(tmp_path) == []
        ledger.note("finished", {"files": {FINISHED[0]: file_digest(tmp_path / FINISHED[0])}})
    assert problems(tmp_path) == []


def test_damage_inside_texts_is_one_line_for_whoever_reads_the_ledger(tmp_path: Path):
    """SQLite quotes the damaged text in its message, which is then not UTF-8."""
    finished(tmp_path)
    path = tmp_path / "ledger.sqlite"
    whole = path.read_bytes()
    texts = [match.start() for match in re.finditer(rb"CHECK|CREATE|DEFAULT|contributions|samples|state", whole)]
    for place in texts[::3]:
        path.write_bytes(whole[: place + 1] + b"\xff" + whole[place + 2 :])
        try:
            with Ledger.open(tmp_path, server=False) as ledger:
                for read in (ledger.requests, ledger.newest, ledger.last_round):
                    read()
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, error
        assert waiting(tmp_path) in ([], ["r1"])
        assert check(tmp_path), place
