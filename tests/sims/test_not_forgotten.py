"""A method whose network does not depend on its slots: every text says that forgetting does not change the network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sims.commands import Command

pytestmark = pytest.mark.usefixtures("blank_pictures")
HERE = Path(__file__).parents[1]
WORDS = ["rounds=1", "sites.0.samples=40", "training.epochs=1", "objective.name=tests.server.slot_methods:Prox"]
WARNING = "has the same bits without any of the measured sites"
NOT = "the network has not forgotten"


def run(fedloom: Command, root: Path, method: str) -> str:
    said = fedloom("run", HERE / "outside" / "fedprox.yaml", f"run.root={root}", *WORDS,
                   f"strategy.name=tests.server.slot_methods:{method}")  # fmt: skip
    assert said.code == 0, said.err
    return said.out + said.err


def test_every_text_says_that_the_network_has_not_forgotten(fedloom: Command, tmp_path: Path):
    assert f"Warning: the saved {WARNING}" in run(fedloom, tmp_path, "Saved")
    folder = tmp_path / "fedprox"
    said = fedloom("unlearn", folder, "site-0001", "--request-id", "r1")
    assert said.code == 0 and NOT in said.out
    report = (folder / "report.html").read_text()
    assert "site-0001 was forgotten on request: its contributions are removed" in report
    assert f"measurements show that {NOT} site-0001" in report
    assert fedloom("proof", folder, "r1", "--out", tmp_path / "p.zip").code == 0
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        archive.extractall(tmp_path / "proof")
    first = (tmp_path / "proof" / "README.txt").read_text().partition("\n")[0]
    assert NOT in first and "--restore" not in first  # advice is for the operator
    done = subprocess.run([sys.executable, "-I", tmp_path / "proof" / "verify.py"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith(f"All checks passed. But the certificate says that {NOT}")


def test_a_method_that_computes_its_network_from_the_slots_is_not_warned_of(fedloom: Command, tmp_path: Path):
    assert WARNING not in run(fedloom, tmp_path, "FedProx")
