"""Requests on the command line: who asked, why, and how far it is."""

import json
from pathlib import Path

import pytest

from fedloom.server.ledger import Ledger
from fedloom.server.unlearning.certificate import read
from fedloom.server.unlearning.requests import receive
from tests.sims.commands import ONE, TWO, Command

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_requests_are_listed_with_who_asked_and_why(fedloom: Command, run: Path):
    assert "no requests yet" in fedloom("requests", run).out
    with Ledger.open(run, server=False) as ledger:
        receive(ledger, "r2", [TWO], "", {"repair": 2}, "dpo")
        ledger.cancel("r2", "ops")
        receive(ledger, "r3", ["site-0000"], "later", {})
    said = fedloom("requests", run, "--json")
    assert said.err == f"note: 1 request waits in {run}; `fedloom requests {run}` shows more\n"
    two, three = json.loads(said.out)["requests"]
    assert (two["state"], two["by"], two["answer"], two["options"]) == (
        "cancelled",
        "dpo",
        "cancelled by ops",
        {"repair": 2},
    )
    assert (three["state"], three["by"], three["reason"], three["outstanding"]) == ("received", "", "later", [])
    assert [*two["times"]] == ["received", "refused"]
    assert "| r3 | received | site-0000 | - |" in fedloom("requests", run).out


def test_who_asks_is_in_the_ledger_and_the_certificate(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1", "--by", "dpo", "--reason", "consent").code == 0
    assert read(run / "certificates" / "r1.json")["by"] == "dpo"
    said = fedloom("requests", run)
    assert f"| r1 | verified | {ONE} | dpo |" in said.out and said.err == ""
    assert "who asked | match" in fedloom("verify", run / "certificates" / "r1.json", run).out


def test_the_operators_key_is_replaced_by_a_command(fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDLOOM_KEY", str(tmp_path / "mine.key"))
    old = fedloom("key").out
    said = fedloom("key", "--rotate")
    assert said.out.startswith("ssh-ed25519 ") and said.out != old and f"The old key is in {tmp_path}/mine-" in said.err
    assert fedloom("key", "--former").out == said.out + old
    assert fedloom("key", "--former", "--pem").out.count("BEGIN PUBLIC KEY") == 2
