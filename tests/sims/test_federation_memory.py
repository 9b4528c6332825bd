"""A site's machine keeps some of its memory, whatever a server orders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BEGIN = "from fedloom.sims.federation.own_app import ANY, be_client_app; be_client_app(ANY)\n"
ALL = "import torch; from fedloom.conf.machine import memory; torch.empty(8); torch.empty(memory(), dtype=torch.uint8)"
ORDER = """
import sys
from fedloom.conf.machine import limit_memory
limit_memory(1.5e9)
from pathlib import Path
from fedloom.clients.protocol.messages import EVALUATE
from tests.attacks.hostile import Server
words = ("sites=[{domain: digits}]", "data.size=2000", "network={name: resnet10}", "evaluation.where=sites")
reply = Server(Path(sys.argv[1]), words, keys=False).reply(0, EVALUATE, split="test")
assert reply.has_error() and "site's own log" in reply.error.reason, reply
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")


def said(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_clientapp_cannot_take_all_memory():
    found = said(BEGIN + ALL)
    assert found.returncode == 1 and "can't allocate memory" in found.stderr


def test_images_that_do_not_fit_are_an_error_of_the_site(tmp_path: Path):
    found = said(ORDER, str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert "allocate" in found.stderr  # the site's own log


def test_a_limit_of_more_memory_than_a_machine_can_have_is_no_error():
    assert said("from fedloom.conf.machine import limit_memory; limit_memory(1e39); print('done')").stdout == "done\n"
