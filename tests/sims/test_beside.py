"""Commands and scripts in a folder whose files have the names of our packages, of standard modules, and common ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.conf.package import ROOMS

COMMON = ("utils", "models", "types", "random", "config", "main", "test", "logging", "queue", "typing")
FEDLOOM = Path(sys.executable).parent / "fedloom"
QUICK = ["digits", "rounds=1", "sites.0.samples=40", "sites.1.samples=40", "evaluation.sites=0"]
SCRIPT = f"""
import fedloom

if __name__ == "__main__":
    print(fedloom.run(*{QUICK}, "engine.name=inline").folder)
"""


def crowded(folder: Path, names: tuple[str, ...]) -> Path:
    """A folder with a file and (for every other name) a package of each name, none of which can be imported."""
    for number, name in enumerate(names):
        file = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(f"raise RuntimeError('{name} of the folder was imported')\n")
    (folder / "data").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return folder


def ran(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    quiet = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, words)), cwd=folder, env=quiet, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("order", [1, -1])
def test_commands_run_beside_files_of_any_name(tmp_path: Path, order: int) -> None:
    folder = crowded(tmp_path, (*ROOMS, *COMMON)[::order])
    for words in (["run", *QUICK, "engine.name=inline"], ["unlearn", "runs/digits", "site-0001"],
                  ["run", *QUICK, "engine.name=inline", "run.name=many", "--seeds", "0,1", "--parallel", "2"],
                  ["compose", "runs/digits", "--sites", "site-0000", "--out", "a.safetensors"]):  # fmt: skip
        done = ran(folder, FEDLOOM, *words)
        assert not done.returncode, (words, done.stderr)
    assert json.loads((folder / "runs/digits/summary.json").read_text())["status"] == "finished"


def test_workers_of_ray_run_beside_files_of_any_name(tmp_path: Path) -> None:
    done = ran(crowded(tmp_path, (*ROOMS, *COMMON)), FEDLOOM, "run", *QUICK, "engine.name=ray", "engine.workers=1")
    assert not done.returncode, done.stderr


def test_a_script_runs_beside_files_of_the_names_of_our_packages(tmp_path: Path) -> None:
    done = ran(crowded(tmp_path, (*ROOMS, "utils", "models", "config", "main", "test")), sys.executable, "script.py")
    assert not done.returncode and done.stdout.splitlines()[-1].endswith("runs/digits"), done.stderr


@pytest.mark.parametrize("name", ["random", "logging", "queue", "typing"])
def test_a_file_that_hides_a_standard_module_is_named(tmp_path: Path, name: str) -> None:
    done = ran(crowded(tmp_path, (name,)), sys.executable, "script.py")
    message = f"ImportError: {tmp_path / name}.py hides the standard module '{name}': rename it"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == message
