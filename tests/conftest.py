"""What all tests share."""

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase
from PIL import Image
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from fedloom.conf.package import ROOMS
from tests.data_folder import FOLDER, below

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Tests alone have this checkout on their search path: what imports `conf` and not `fedloom.conf` fails here, as elsewhere.
for room in ROOMS:
    sys.modules[room] = None  # type: ignore[assignment]

# Threads of tiny operations that wait for a core are many times slower than one thread. Each of the workers that share the
# tests has a core of its own, and so have the processes that it starts.
os.environ["OMP_NUM_THREADS"] = "1"
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# A shell that starts the tests in the background makes them ignore Ctrl-C, with which tests interrupt runs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start find all modules compiled, also where Python must not write them beside the sources.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")

# Runs wait for the disk at each commit: where there is memory for their folders, they are made there.
MEMORY, ROOM = Path("/dev/shm"), 8 * 2**30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# The same examples in every run, so that CI fails for what was changed only. For a nightly run that draws new ones and keeps
# what fails in .hypothesis: pytest --hypothesis-profile=random
settings.register_profile("fixed", derandomize=True, deadline=None)
# (A new profile inherits what hypothesis finds for the machine: on a CI server no new examples and no store.)
settings.register_profile(
    "random",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    deadline=None,
    print_blob=True,
)
settings.load_profile("fixed")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """The system's Chromium, with Playwright."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with playwright.sync_playwright() as found:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # which Chromium refuses for root
        browser = found.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


# Folders whose tests start real nodes or Ray: on one worker each, so that they share what takes long to start, and so that
# no two of them slow each other down.
ALONE = ("tests/flower/", "tests/engines/")


class ByFile(LoadFileScheduling):
    """Give each worker a file at a time, or a whole folder of ALONE."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in ALONE if nodeid.startswith(folder)), super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders of ALONE first, then files with slow tests: at the end no worker waits for another's long file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.nodeid.startswith(ALONE), item.path not in slow))
    for item in items:
        if item.get_closest_marker("data") and not FOLDER.is_dir():
            item.add_marker(pytest.mark.skip(reason="needs a data folder: set FEDLOOM_DATA"))


opened: list[str] = []  # files of the data folder that the present test has opened


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes) and below(os.fsdecode(arguments[0])):
        opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_watch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers, alone and after others."""
    opened.clear()
    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The tests marked `data`, and no others, read the data folder."""
    if opened and not item.get_closest_marker("data"):
        pytest.fail(f"reads {opened[0]} of the data folder; use an embedded domain, or mark the test `data`", pytrace=False)
    if (torch.get_default_device().type, torch.get_default_dtype()) != ("cpu", torch.float32):
        pytest.fail("leaves another default device or type in torch; the next tests would fail", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache or keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="module")
def blank_pictures() -> Iterator[None]:
    """Reports have one blank picture. To draw takes longer than a small run; the tests of reports look at what is drawn."""

    def draw(folder: Path, *_: object) -> list[Path]:
        picture = folder / "plots" / "accuracy.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (1, 1)).save(picture)
        return [picture]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.sims.report.plots.draw_all", draw)
        yield
