"""A federation of machines that several files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.sims.federation import local
from fedloom.sims.federation.plan import SERVER, sites_of
from fedloom.sims.federation.programs import running


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three authenticated nodes of a SuperLink with TLS, started once. Each test restores what it changes."""
    folder = tmp_path_factory.mktemp("machines") / "federation"
    try:
        assert local.up(folder, 3, tls=True) == ["site-0000", "site-0001", "site-0002"]
        yield folder
    finally:
        local.down(folder)
        assert not any(running(folder / name) for name in [SERVER, *sites_of(folder)])
