"""What the tests of engines share."""

from pathlib import Path

import pytest
import ray

from fedloom.sims.engines.local_ray import begin


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop Ray after the last file of this folder."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def no_other_ray(request: pytest.FixtureRequest) -> None:
    """Stop the shared Ray before a file that does not use it."""
    items = (item for item in request.session.items if item.path == request.path)
    if not any("one_ray" in getattr(item, "fixturenames", ()) for item in items):
        ray.shutdown()


@pytest.fixture(scope="module")
def one_ray() -> None:
    """One Ray for all files of this folder: to start it takes longer than most of their tests."""
    if not ray.is_initialized():
        begin(workers=2, num_cpus=1)
