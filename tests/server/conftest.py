"""What all of the server's tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.parts import close_all, folder, one_thread
from tests.server.resumes import configured, results, run


@pytest.fixture(autouse=True)
def _one_thread():
    one_thread()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


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
