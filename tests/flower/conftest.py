"""A federation of machines that several files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.sims.federation import local
from fedloom.sims.federation.plan import SERVER, sites_of
from fedloom.sims.federation.programs import running

SHARING = {"test_federation.py", "test_faults.py", "test_outsiders.py"}
started: list[Path] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that share the federation first."""
    items.sort(key=lambda item: item.path.parent == Path(__file__).parent and item.path.name not in SHARING)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the federation after the last file that shares it: idle nodes need a quarter of a core."""
    if started and (nextitem is None or nextitem.path.name not in SHARING):
        folder = started.pop()
        local.down(folder)
        assert not any(running(folder / name) for name in [SERVER, *sites_of(folder)])


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three authenticated nodes of a SuperLink with TLS, started once. Each test restores what it changes."""
    folder = tmp_path_factory.mktemp("machines") / "federation"
    started.append(folder)
    assert local.up(folder, 3, tls=True) == ["site-0000", "site-0001", "site-0002"]
    yield folder
    local.down(folder)  # also where an interruption came before the last test
