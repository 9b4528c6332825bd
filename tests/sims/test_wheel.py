"""What is installed from a wheel: all that the program reads is in it, and it runs outside of the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedloom.conf.package import ROOMS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, of a copy: building leaves files behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run(build, capture_output=True, check=True)
    return out


def test_the_wheel_runs_the_main_job_elsewhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site-packages")
    words = ["run", "rounds=1", "engine.name=inline", "sites.0.samples=40", "sites.1.samples=40", "--json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "fedloom.sims.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages")},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"
    assert (tmp_path / "runs/digits/report.html").is_file()


def test_everything_that_is_read_is_in_both(built: Path) -> None:
    read = {path.relative_to(ROOT).as_posix() for folder in ("conf", "sims") for path in (ROOT / folder).rglob("*.yaml")}
    assert "conf/digits.yaml" in read
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    modules = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {f"fedloom/{name}" for name in read | modules | {"__init__.py", "py.typed"}} <= set(
        zipfile.ZipFile(wheel).namelist()
    )
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert read | {"pyproject.toml", "README.md", "LICENSE"} <= names
