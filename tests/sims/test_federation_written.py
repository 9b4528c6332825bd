"""Files of a federation's folders when the disk is full or a command is killed: what was there stays, or is completed."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.conf.yaml_text import read_yaml
from fedloom.sims.federation import files, plan
from fedloom.sims.federation.files import read_small, write_private, write_together
from fedloom.sims.federation.joining import read_request
from fedloom.sims.federation.keys import AUTHORITY, NODE_KEY
from fedloom.sims.federation.members import _keys
from fedloom.sims.federation.plan import KEYS, SERVER, Plan, members, sites_of, write_plan
from fedloom.sims.federation.programs import environment
from fedloom.sims.federation.sheets import SITE
from tests.sims.commands import Command, refused

SITES = [{"name": "north"}, {"name": "south"}]


def on_a_full_disk(*words: object) -> subprocess.CompletedProcess[str]:
    """A command that can write no byte into a file."""

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [sys.executable, "-m", "fedloom.sims.cli", "federation", *map(str, words)]
    env = {**environment(), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, preexec_fn=full, capture_output=True, text=True, timeout=60, env=env)


def content(*folders: Path) -> dict[str, bytes]:
    """All files in folders."""
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_takes_no_one_a_key(fedloom: Command, tmp_path: Path):
    site, other, machines = tmp_path / "east", tmp_path / "other", tmp_path / "m"
    (tmp_path / "nodes.yaml").write_text("join: true")
    assert fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", machines).code == 0
    for home in (site, other):
        assert fedloom("federation", "join", "east", "--superlink", "a:1", "--folder", home).code == 0
    assert fedloom("federation", "admit", site / "join.request", "--folder", machines, "--yes").code == 0
    before = content(tmp_path)
    file = machines / "server" / "members.yaml"
    for words in (
        ("join", "east", "--rekey", "--folder", site), ("join", "west", "--superlink", "a:1", "--folder", tmp_path / "west"),
        ("admit", other / "join.request", "--folder", machines, "--rekey", "--yes"),
        ("accept", file, "--folder", site, "--yes"), ("plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "n"),
    ):  # fmt: skip
        done = on_a_full_disk(*words)
        assert done.returncode == 2 and "cannot be written (File too large)" in done.stderr, (words, done)
        assert content(tmp_path) == before, words
    for words in (("join", "west", "--superlink", "a:1", "--folder", tmp_path / "west"),
                  ("admit", other / "join.request", "--folder", machines, "--rekey", "--yes")):  # fmt: skip
        assert fedloom("federation", *words).code == 0
    assert members(machines / "server")["east"] == (other / "key.pub").read_text().strip()


def test_files_are_written_together_or_not_at_all(tmp_path: Path):
    first, second = tmp_path / "a", tmp_path / "b"
    write_together({first: b"1", second: b"1"})
    with pytest.raises(OSError, match="missing"):
        write_together({first: b"2", second: b"2", tmp_path / "missing" / "c": b"2"})
    assert content(tmp_path) == {str(first): b"1", str(second): b"1"}
    assert first.stat().st_mode & 0o077 == 0
    write_private(first, b"3")
    assert content(tmp_path) == {str(first): b"3", str(second): b"1"}


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.parametrize("steps", range(0, 48, 2))
def test_a_plan_that_was_killed_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int):
    left = steps

    def step(do: Callable[..., object]) -> Callable[..., object]:
        def done(*given: object, **more: object) -> object:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return do(*given, **more)

        return done

    folder, given = tmp_path / "m", Plan(sites=SITES)
    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "mkdir"):
            patch.setattr(Path, name, step(getattr(Path, name)))
        patch.setattr(os, "open", step(os.open))
        with pytest.raises(Killed):
            write_plan(given, folder)
    with_all = {AUTHORITY, NODE_KEY, f"{NODE_KEY}.pub", SITE, "peers"}
    try:
        write_plan(given, folder)
    except UserError as error:
        assert "already has all sites of the plan" in str(error)
    assert sites_of(folder) == ["north", "south"] == sorted(members(folder / SERVER))
    for name in sites_of(folder):
        assert {path.name for path in (folder / name).iterdir()} == with_all
        assert (folder / name / "key.pub").read_text() == (folder / SERVER / KEYS / f"{name}.pub").read_text()
        assert len((folder / name / "peers").read_text().splitlines()) == 2
    assert set(read_yaml((folder / SERVER / "members.yaml").read_text())["sites"]) == {"north", "south"}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("there", [[], [AUTHORITY], [AUTHORITY, NODE_KEY, f"{NODE_KEY}.pub"]])
@pytest.mark.parametrize("known", [False, True])
def test_an_unfinished_folder_of_an_earlier_plan_is_completed(tmp_path: Path, there: list[str], known: bool):
    folder = tmp_path / "m"
    write_plan(Plan(sites=SITES), folder)
    for path in (folder / "south").iterdir():
        if path.name not in there:
            path.unlink()
    if not known:
        (folder / SERVER / KEYS / "south.pub").unlink()
    assert write_plan(Plan(sites=SITES), folder) == [folder / "south"]
    assert (folder / "south" / "key.pub").read_text() == (folder / SERVER / KEYS / "south.pub").read_text()
    assert (folder / "south" / SITE).is_file()


def test_a_site_that_was_removed_is_not_let_in_by_a_plan(tmp_path: Path):
    folder = tmp_path / "m"
    write_plan(Plan(sites=SITES), folder)
    (folder / SERVER / KEYS / "south.pub").unlink()
    for more in ([], [{"name": "west"}]):
        with contextlib.suppress(UserError):
            write_plan(Plan(sites=[*SITES, *more]), folder)
        assert "south" not in members(folder / SERVER)
    assert "west" in members(folder / SERVER)


def test_a_folder_of_others_is_left_alone(tmp_path: Path):
    folder = tmp_path / "m"
    write_plan(Plan(sites=SITES), folder)
    shutil.rmtree(folder / "south")
    (folder / SERVER / KEYS / "south.pub").unlink()
    (folder / "south").mkdir()
    (folder / "south" / "notes").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        write_plan(Plan(sites=SITES), folder)
    assert content(folder / "south") == {str(folder / "south" / "notes"): b"mine"}


def test_what_is_not_a_small_file_is_not_read(fedloom: Command, tmp_path: Path):
    pipe, endless, large = tmp_path / "pipe", tmp_path / "endless", tmp_path / "large"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    large.write_bytes(bytes(files.MOST_KEY + 1))
    for path in (pipe, endless, large, tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|more than|directory"):
            read_small(path)
    machines = tmp_path / "m"
    write_plan(Plan(sites=SITES), machines)
    for path in (pipe, endless):
        refused(fedloom("federation", "admit", path, "--folder", machines, "--yes"), "cannot be read: is not a regular file")
        with pytest.raises(UserError, match="is not a regular file"):
            read_request(path)
    keys = machines / SERVER / KEYS
    for name, path in {"pipe": pipe, "endless": endless, "large": large}.items():
        (keys / f"{name}.pub").symlink_to(path)
        with pytest.raises(UserError, match=f"{name}.pub: "):
            plan.members(machines / SERVER)
        assert len(_keys(keys)) == 2
        (keys / f"{name}.pub").unlink()
