"""Machines of a real federation that fail or lie, and a second server: the run goes on, and the fault is reported."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf.package import copy_package
from fedloom.sims.federation import local
from fedloom.sims.federation.sheets import SITE, SiteSheet, read, write
from tests.flower.machines import CONVOLUTIONS, ENVIRONMENT, ROOT, fedloom, rounds, run, until, words
from tests.flower.proxy import network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUT_SECONDS = 8.0  # longer than Flower's nodes wait for an answer


@pytest.fixture(scope="module")
def weathered(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of a run in which site-0001's network is cut for a while and site-0002's operator has altered the program."""
    root, homes = tmp_path_factory.mktemp("weathered"), [federation / name for name in ("site-0001", "site-0002")]
    kept = [(home / SITE).read_text() for home in homes]
    sheets = [read(SiteSheet, home / SITE) for home in homes]
    altered = {"PYTHONPATH": os.pathsep.join([str(alter(root / "altered")), str(ROOT)])}
    for home in homes:
        local.stop(home)
    try:
        with network(int(sheets[0].superlink.rpartition(":")[2])) as between:
            write(homes[0] / SITE, replace(sheets[0], superlink=f"127.0.0.1:{between.port}"))
            write(homes[1] / SITE, replace(sheets[1], environment=altered))
            local.up(federation, 3, tls=True)
            more = ["rounds=3", "federation.min_replies=1", "federation.timeout=60", CONVOLUTIONS]
            command = [sys.executable, "-m", "fedloom.sims.cli", "run", "digits", *words(federation, root, "cut", *more)]
            with subprocess.Popen(
                command, cwd=root, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as child:
                try:
                    until(lambda: rounds(root / "cut") >= 1, "no round was committed")
                    between.cut()
                    time.sleep(CUT_SECONDS)
                    between.mend()
                    out = child.communicate(timeout=300)[0].decode()
                finally:
                    child.kill()
            assert child.returncode == 0, out
            for home in homes:
                local.stop(home)
        return [json.loads(line) for line in (root / "cut" / "metrics.jsonl").read_text().splitlines()]
    finally:
        for home, text in zip(homes, kept, strict=True):
            local.stop(home)
            (home / SITE).write_text(text)
        local.up(federation, 3, tls=True)


def alter(folder: Path) -> Path:
    """The package with another ClientApp, before the installed one: any operator may have one on its own machine."""
    folder.mkdir(parents=True)
    home = copy_package(folder) / "sims" / "federation"
    (home / "node_app.py").rename(home / "honest_app.py")
    (home / "node_app.py").write_text(ALTERED)
    return folder


ALTERED = """
from flwr.clientapp import ClientApp

from fedloom.sims.federation.honest_app import app as honest
from fedloom.clients.protocol.bundles import unbundled
from fedloom.sims.benchmarks.soak_replies import REFUSED

class Altered(ClientApp):
    def __call__(self, message, context):
        reply = honest(message, context)
        if message.metadata.message_type != "train":
            return reply
        reply.content = unbundled(reply.content)
        return REFUSED["NaN"][0](reply)

app = Altered()
"""


def test_a_site_whose_network_is_cut_takes_part_again(weathered: list[dict[str, Any]]):
    assert [record["round"] for record in weathered] == [1, 2, 3]
    assert "site-0001" not in weathered[0]["dropped"] and "site-0001" not in weathered[2]["dropped"]
    assert all("site-0000" not in record["dropped"] for record in weathered)


def test_what_an_altered_program_answers_is_refused(weathered: list[dict[str, Any]]):
    assert all("not finite" in record["dropped"]["site-0002"] for record in weathered)


def test_a_second_server_of_a_run_is_refused_in_a_line_and_one_of_another_run_is_not(federation: Path, tmp_path: Path):
    given = words(federation, tmp_path, "one", "rounds=1000")
    child = subprocess.Popen([sys.executable, "-m", "fedloom.sims.cli", "run", "digits", *given], cwd=tmp_path,
                             env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        until(lambda: rounds(tmp_path / "one") >= 1, "no round was committed")
        for command in (["resume", "one"], ["run", "digits", *given, "--overwrite"]):
            output = fedloom(tmp_path, *command)
            assert output.returncode and f"process {child.pid} is working on it" in output.stderr.splitlines()[-1], (
                output.stderr
            )
        assert run(federation, tmp_path, "other", "rounds=1")["status"] == "finished"
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(timeout=60)
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["status"] == "interrupted"
