"""The files of deploy/: every command in them is one of fedloom's, with its options, and systemd accepts the units."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from fedloom.sims.cli.main import app
from fedloom.sims.federation.plan import Plan, write_plan
from fedloom.sims.federation.sheets import read

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
INSTALLED = "/opt/fedloom/bin/fedloom"
HARDENED = {"CapabilityBoundingSet": "", "NoNewPrivileges": "yes", "PrivateTmp": "yes", "ProtectHome": "yes",
            "ProtectSystem": "strict", "SystemCallFilter": "@system-service", "User": "fedloom"}  # fmt: skip


def parsed(words: Sequence[str]) -> click.Context:
    """Parse a command line as fedloom does, and carry nothing out. Raises click.UsageError for what fedloom refuses."""
    command: click.Command = typer.main.get_command(app)
    context = command.make_context("fedloom", list(words))
    while isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context


def service(unit: Path) -> configparser.SectionProxy:
    file = configparser.ConfigParser(interpolation=None)
    file.optionxform = str  # type: ignore[assignment, method-assign]
    file.read(unit)
    return file["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_runs_a_command_of_fedloom_without_privileges(unit: Path):
    program, *words = shlex.split(service(unit)["ExecStart"].replace("%i", "north"))
    assert program == INSTALLED and parsed(words).parent is not None
    assert {key: service(unit)[key] for key in HARDENED} == HARDENED


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path):
    for unit in UNITS:
        text = unit.read_text().replace(INSTALLED, sys.executable)  # which exists here
        (tmp_path / unit.name.replace("@.", "@north.")).write_text(text)
    files = sorted(tmp_path.iterdir())
    said = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_services_run_commands_of_fedloom(compose: dict[str, Any]):
    for name, one in compose["services"].items():
        assert parsed(one["command"]).parent is not None, name
        assert one["read_only"] and one["cap_drop"] == ["ALL"]
        kind, program, *words = one["healthcheck"].get("test", ["CMD", "none"])
        assert kind == "CMD" and program in ("fedloom", "python", "none")
        if program == "fedloom":
            parsed(words)
        if program == "python":
            compile(words[1], "healthcheck", "exec")
            assert "https://localhost:8642/health" in words[1]


def test_the_volumes_are_those_of_the_plan(compose: dict[str, Any], tmp_path: Path):
    (tmp_path / "nodes.yaml").write_text(compose["configs"]["nodes"]["content"])
    homes = {home.name for home in write_plan(read(Plan, tmp_path / "nodes.yaml"), tmp_path / "machines")}
    mounts = [mount for one in compose["services"].values() for mount in one["volumes"]]
    assert {mount["volume"]["subpath"] for mount in mounts if isinstance(mount, dict)} == homes
    sources = {mount["source"] if isinstance(mount, dict) else mount.partition(":")[0] for mount in mounts}
    assert sources == set(compose["volumes"])
    for name in ("north", "south", "east"):
        (mount,) = compose["services"][name]["volumes"]
        assert mount["volume"]["subpath"] == name  # a node sees its own folder alone


def test_the_image_runs_the_desk_as_an_ordinary_user():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = {word: rest for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word.isupper()}
    assert steps["USER"] == "10001:10001" and json.loads(steps["ENTRYPOINT"]) == ["fedloom"]
    assert parsed(json.loads(steps["CMD"])).info_name == "serve"
    program = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    compile(program[2], "healthcheck", "exec")
    assert "http://127.0.0.1:8642/health" in program[2]


def commands() -> Iterator[str]:
    for block in re.findall(r"```bash\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL):
        yield from (line.partition("  #")[0] for line in block.splitlines() if line.startswith("fedloom "))


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_guide_exist(line: str):
    assert parsed(shlex.split(line.replace(" ID", " 7"))[1:]).parent is not None


def test_the_guide_is_short_and_lists_all_files():
    text = (DEPLOY / "README.md").read_text()
    assert len(text.split()) <= 400
    assert {file.name for file in DEPLOY.iterdir()} - {"README.md"} <= set(re.findall(r"`([^`]+)`", text))


def test_what_fedloom_refuses_is_found_here():
    for words in (["federation", "serve"], ["backup", "run"], ["federation", "status", "--jsn"]):
        with pytest.raises(click.UsageError):
            parsed(words)
