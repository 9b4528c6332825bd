"""The ledger of a run: what is committed is there, what is not never happened, and one server writes."""

import hashlib
import sqlite3
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Contribution, Ledger, LedgerError
from fedloom.server.ledger.database import SEAL
from fedloom.server.ledger.tables import FORMAT
from tests.server.ledgers import CONFIG, SITES, Plain, closed, contribution, new, problems


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events()]


def refused(ledger: Ledger, match: str, call, *arguments) -> None:
    """Assert that a call is refused in one line and leaves everything as it was."""
    before = (kinds(ledger), ledger.rounds(), ledger.all_latest(), ledger.sites())
    with pytest.raises(LedgerError, match=match) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    assert (kinds(ledger), ledger.rounds(), ledger.all_latest(), ledger.sites()) == before


def test_a_new_ledger_knows_its_run_and_sites(tmp_path: Path):
    with new(tmp_path) as ledger:
        run = ledger.run()
        assert (run.run, run.config, run.bits, run.format) == ("digits", CONFIG, 32, FORMAT)
        assert ledger.sites() == dict.fromkeys(SITES, False)
        assert (ledger.last_round(), ledger.all_latest(), ledger.latest("a"), ledger.rounds()) == (None, {}, None, [])
        assert kinds(ledger) == ["created"]


@pytest.mark.parametrize("keep", ["latest", "all"])
def test_rounds_replace_contributions_or_keep_them(tmp_path: Path, keep):
    plain = Plain(keep)
    with new(tmp_path) as ledger:
        for sites in (SITES, ("a", "b"), (), ("a",)):
            plain.commit(ledger, sites)
            plain.agrees(ledger)
        assert [one.round for one in ledger.history("a")] == ([3] if keep == "latest" else [0, 1, 3])
        assert [bool(row.states) for row in ledger.rounds()] == ([False] * 3 + [True] if keep == "latest" else [True] * 4)
        assert len(ledger.blobs.names()) == (4 + 2 if keep == "latest" else 4 + 2 + 1 + 2 * 4 - 1)  # two rounds' sums agree
        assert problems(tmp_path) == []


def test_a_blob_that_another_row_refers_to_stays(tmp_path: Path):
    with new(tmp_path) as ledger:
        same = ledger.blobs.put({"w": torch.ones(2, dtype=torch.int64)})
        other = ledger.blobs.put({"w": torch.zeros(2, dtype=torch.int64)})
        ledger.commit_round(0, {site: Contribution(same, 1, 0, 32) for site in "ab"}, {}, {}, None, "latest")
        ledger.commit_round(1, {"a": Contribution(other, 1, 1, 32)}, {}, {}, None, "latest")
        assert ledger.blobs.names() == {same, other}
        ledger.commit_round(2, {"b": Contribution(other, 1, 2, 32)}, {}, {}, None, "latest")
        assert ledger.blobs.names() == {other}


def test_commits_that_do_not_fit_are_refused_whole(tmp_path: Path):
    plain = closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        plain.forget(ledger, ["d"])
        good, late = contribution(ledger, "a", 3), contribution(ledger, "a", 2)
        states = {}, {}, {"loss": 1.0}, "latest"
        refused(ledger, "round 2 cannot follow .*continue with round 3", ledger.commit_round, 2, {"a": late}, *states)
        refused(ledger, "unknown site 'aa'; did you mean 'a'", ledger.commit_round, 3, {"aa": good}, *states)
        refused(ledger, r"'d' is forgotten \(these are not: a, b, c\)", ledger.commit_round, 3, {"d": good}, *states)
        refused(ledger, "round 3: a contribution belongs to round 2", ledger.commit_round, 3, {"a": late}, *states)
        refused(ledger, "not 'none'", ledger.commit_round, 3, {"a": good}, {}, {}, None, "none")
        missing = {"a": Contribution("0" * 64, 1, 3, 32)}
        refused(ledger, "this blob is missing", ledger.commit_round, 3, missing, *states)
        refused(ledger, "this blob is missing", ledger.commit_round, 3, {}, {"sum": "f" * 64}, {}, None, "latest")
        refused(ledger, "CHECK", ledger.commit_round, 3, {"a": Contribution(good.blob, -1, 3, 32)}, *states)
        refused(ledger, "as JSON", ledger.commit_round, 3, {"a": good}, {}, {}, {"loss": float("nan")}, "latest")
        ledger.prune()
        plain.agrees(ledger)


def test_a_forgotten_site_leaves_no_row_no_blob_and_no_older_state(tmp_path: Path):
    plain = closed(tmp_path, keep="all")
    with Ledger.open(tmp_path) as ledger:
        had = {one.blob for one in ledger.history("b")} | {blob for row in ledger.rounds() for blob in row.states.values()}
        plain.forget(ledger, ["b", "d"])
        plain.agrees(ledger)
        assert ledger.latest("b") is None
        assert [bool(row.states) for row in ledger.rounds()] == [False, False, True]
        assert ledger.blobs.names() & had == {
            ledger.blobs.put({"head": torch.full((2,), 2.5)})
        }  # the shared state, as before
        refused(ledger, r"'b' is forgotten \(these are not: a, c\)", plain.forget, ledger, ["b"])
        plain.readmit(ledger, ["b"])
        plain.agrees(ledger)
        assert kinds(ledger)[-2:] == ["forgotten", "readmitted"]
    assert problems(tmp_path) == []


def test_sites_that_cannot_be_forgotten_or_readmitted_are_named(tmp_path: Path):
    with new(tmp_path) as ledger:
        refused(ledger, "no round is committed", ledger.forget, ["a"], {}, {}, {})
        Plain().commit(ledger, SITES)
        refused(ledger, r"unknown site 'x' \(known: a, b, c, d\)", ledger.forget, ["x"], {}, {}, {})
        refused(ledger, "'a' is named twice", ledger.forget, ["a", "b", "a"], {}, {}, {})
        refused(ledger, r"'a' is not forgotten \(these are: none\)", ledger.readmit, ["a"], {}, {}, {})
        refused(ledger, "'b' has a contribution but", ledger.readmit, ["a"], {"b": contribution(ledger, "b", 0)}, {}, {})
    with pytest.raises(LedgerError, match="'a' is named twice"):
        Ledger.create(tmp_path / "new", "digits", CONFIG, 32, ["a", "a"])
    assert not (tmp_path / "new").exists()


def test_a_request_goes_forward_only_and_is_received_once(tmp_path: Path):
    plain = closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        first = ledger.receive("r1", "forget", ["b"], "asked", {"exact": True})
        assert (first.state, first.sites, first.options, first.result) == ("received", ("b",), {"exact": True}, None)
        ledger.receive("r0", "forget", ["a"], "", {})
        assert ledger.receive("r1", "readmit", ["a", "nobody"], "other", {}) == first
        assert [request.id for request in ledger.waiting()] == ["r1", "r0"]
        refused(ledger, "request 'r1' is received: it cannot become 'verified'", ledger.set_request, "r1", "verified", None)
        refused(ledger, "unknown request 'r2'", ledger.set_request, "r2", "applied", None)
        refused(ledger, "unknown site 'x'", ledger.receive, "r3", "forget", ["x"], "", {})
        plain.forget(ledger, ["b"], "r1")
        assert [request.id for request in ledger.waiting()] == ["r0"]
        refused(ledger, "'r1' is applied: it cannot become 'applied'", ledger.set_request, "r1", "applied", None)
        ledger.set_request("r1", "verified", {"certificate": "states/c.json"})
        done = ledger.request("r1")
        assert done is not None
        assert (done.state, done.result) == ("verified", {"certificate": "states/c.json"})
        assert ledger.request("r9") is None
        assert kinds(ledger)[-5:] == ["received", "received", "forgotten", "applied", "verified"]
    assert problems(tmp_path) == []


def test_a_request_that_cannot_be_applied_forgets_nobody(tmp_path: Path):
    closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        refused(ledger, "unknown request 'r1'", ledger.forget, ["a"], {}, {}, {}, "r1")


def test_events_are_chained_and_cannot_be_changed(tmp_path: Path):
    closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        ledger.note("started", {"on": "ä"})
        for kind in ("round", "created", "applied"):
            refused(ledger, "`note` cannot add it", ledger.note, kind, {})
        events = list(ledger.events())
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    before = "0" * 64
    for event in events:
        assert event.previous == before
        before = event.digest
    text = f'{events[-1].previous}[5,"{events[-1].time}","started",{{"on":"\\u00e4"}}]'
    assert hashlib.sha256(text.encode()).hexdigest() == before
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        for change in ("UPDATE events SET kind = 'x'", "DELETE FROM events", "REPLACE INTO events SELECT * FROM events"):
            with pytest.raises(sqlite3.IntegrityError, match=r"events are (never|only)"):
                db.execute(change)
    db.close()
    assert problems(tmp_path) == []


def test_pruning_removes_orphans_and_temporaries_and_says_so(tmp_path: Path):
    plain = closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        orphan = ledger.blobs.put({"x": torch.ones(1)})
        (ledger.blobs.folder / ".tmp-1-1").write_bytes(b"")
        assert ledger.prune() == [f"{orphan}.safetensors", ".tmp-1-1"]
        assert ledger.prune() == []
        plain.agrees(ledger)
        assert kinds(ledger)[-1] == "pruned"
    assert problems(tmp_path) == []


def test_the_seal_is_there_while_the_ledger_is_closed_and_only_then(tmp_path: Path):
    closed(tmp_path)
    seal = tmp_path / "ledger.sha256"

    def sealed() -> bool:
        return (
            seal.read_text() == f"{hashlib.sha256((tmp_path / 'ledger.sqlite').read_bytes()).hexdigest()}  ledger.sqlite\n"
        )

    assert sealed()
    assert not list(tmp_path.glob("ledger.sqlite-*"))
    with Ledger.open(tmp_path, server=False) as reader:
        reader.last_round()
        assert sealed()
        with Ledger.open(tmp_path) as ledger:
            assert not seal.exists()
            assert reader.last_round() == ledger.last_round()
            ledger.note("seen", {})
            assert kinds(reader)[-1] == "seen"
        assert sealed()
        reader.receive("r", "forget", ["a"], "", {})
        assert sealed()
        assert [request.id for request in reader.waiting()] == ["r"]
    ledger = Ledger.open(tmp_path)
    ledger.close()
    ledger.close()
    assert sealed()
    with pytest.raises(RuntimeError), Ledger.open(tmp_path):
        raise RuntimeError
    assert not seal.exists()
    assert problems(tmp_path) == []


def test_folders_without_a_ledger_and_files_that_are_none_are_reported(tmp_path: Path):
    def refused(match: str, **how) -> None:
        with pytest.raises(LedgerError, match=match) as error:
            Ledger.open(tmp_path, **how)
        assert "\n" not in str(error.value)

    path = tmp_path / "ledger.sqlite"
    for server in (True, False):
        refused("has no ledger", server=server)
        path.write_bytes(b"not a database" * 100)
        refused("file is not a database", server=server)
        path.write_bytes(b"")
        refused("has no run .*no such table", server=server)
        path.unlink()
    with pytest.raises(LedgerError, match=r"not a directory|Not a directory|File exists"):
        (tmp_path / "file").write_text("")
        Ledger.create(tmp_path / "file" / "run", "digits", CONFIG, 32, SITES)
    path.write_bytes(b"")  # a crash while it was made
    with new(tmp_path) as ledger:
        assert kinds(ledger) == ["created"]
    with pytest.raises(LedgerError, match="has a ledger; open it"):
        new(tmp_path)
    assert problems(tmp_path) == []
    with sqlite3.connect(path) as db:
        db.execute("UPDATE runs SET format = 9")
    db.close()
    refused("has format 9, but this fedloom reads 2 to 4; use the fedloom that wrote it")
    refused("has format 9", server=False)


def test_a_ledger_that_somebody_locks_for_too_long_is_reported(tmp_path: Path):
    closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        refused(ledger, "database is locked; another process has locked it for 5 s", ledger.note, "late", {})
        other.execute("ROLLBACK")
        other.close()
        ledger.note("late", {})


def test_a_reader_changes_nothing_but_the_queue(tmp_path: Path):
    plain = closed(tmp_path)
    with Ledger.open(tmp_path, server=False) as reader:
        plain.agrees(reader)
        refused(reader, "only its server may change it", reader.note, "x", {})
        refused(reader, "only its server may change it", reader.prune)
        refused(reader, "only its server may change it", reader.forget, ["a"], {}, {}, {})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.sampled_from(["latest", "all"]), data=st.data())
def test_any_sequence_of_changes_agrees_with_plain_dicts(tmp_path_factory, keep, data):
    folder = tmp_path_factory.mktemp("any")
    ledger, plain = new(folder), Plain(keep)
    plain.commit(ledger, SITES)
    for _ in range(data.draw(st.integers(1, 8))):
        act = data.draw(st.sampled_from(["commit", "forget", "readmit", "reopen", "drop"]))
        if act in ("reopen", "drop"):
            ledger.close() if act == "reopen" else ledger._database.close()
            ledger = Ledger.open(folder)
        else:
            among = sorted(plain.forgotten) if act == "readmit" else plain.here()
            some = data.draw(st.lists(st.sampled_from(among), unique=True)) if among else []
            getattr(plain, act)(ledger, some)
        plain.agrees(ledger)
    assert ledger.prune() == []
    ledger.close()
    assert problems(folder) == []


def test_a_refused_order_leaves_the_ledger_sealed(tmp_path: Path):
    with new(tmp_path):
        pass
    with pytest.raises(UserError, match="no such thing"), Ledger.open(tmp_path):
        raise UserError("no such thing")
    assert (tmp_path / SEAL).is_file() and problems(tmp_path) == []
    with pytest.raises(RuntimeError), Ledger.open(tmp_path):
        raise RuntimeError("a fault: what is half done is left to the next server")
    assert not (tmp_path / SEAL).exists()
