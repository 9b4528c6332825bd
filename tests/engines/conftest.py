"""What the tests of engines share."""

from collections.abc import Iterator

import pytest
import ray

import fedloom.sims.engines.ray as ray_engine
from fedloom.conf import load


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all tests of a module: to start it takes longer than most of them."""
    ray_engine._start(load("digits").engine, workers=2)
    yield
    ray.shutdown()
