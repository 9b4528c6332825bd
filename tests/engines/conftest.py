"""What the tests of engines share."""

from collections.abc import Iterator

import pytest
import ray

import fedloom.sims.engines.ray as ray_engine
from fedloom.conf import load


@pytest.fixture(scope="session")
def one_ray() -> Iterator[None]:
    """One Ray for the files of the group `one Ray`: to start it takes longer than most of their tests."""
    ray_engine._start(load("digits").engine, workers=2)
    yield
    ray.shutdown()
