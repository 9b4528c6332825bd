"""What all of the server's tests share."""

import pytest

from tests.server.parts import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    one_thread()
