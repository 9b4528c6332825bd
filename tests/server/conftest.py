"""What all of the server's tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import Config
from tests.server.parts import close_all, folder, one_thread
from tests.server.proofs import forgotten_run, proof_of
from tests.server.resumes import configured, results, run, stopped
from tests.server.runs import copied


@pytest.fixture(autouse=True)
def _one_thread():
    one_thread()


@pytest.fixture(autouse=True)
def _closed(tmp_path: Path) -> Iterator[None]:
    """Before the folder goes, what is open in it is closed."""
    yield
    close_all()


@pytest.fixture(scope="session")
def halted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """A copy of a run with these overrides that was stopped after a round. It is trained so far but once."""
    known: dict[tuple[int | str, ...], Config] = {}

    def of(root: Path, after: int, *overrides: str) -> Config:
        key = (after, *overrides)
        if key not in known:
            known[key] = stopped(configured(tmp_path_factory.mktemp("stopped"), *overrides), after)
        return copied(known[key], root)

    return of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The results of a run that nobody stopped."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def of(*overrides: str) -> dict[str, Any]:
        if overrides not in known:
            config = configured(tmp_path_factory.mktemp("smooth"), *overrides)
            run(config)
            known[overrides] = results(folder(config))
        return known[overrides]

    return of


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that has forgotten a site, and went on for a round."""
    return forgotten_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def proof(forgotten: Config, tmp_path: Path) -> Path:
    """The files of its proof; the zip is beside them."""
    return proof_of(forgotten, tmp_path)
