"""What all of the server's tests share."""

from collections.abc import Iterator

import pytest

from tests.server.parts import close_all, one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    one_thread()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()
