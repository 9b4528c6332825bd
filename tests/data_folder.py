"""The folder with the shipped data sets, which only tests marked `data` read. All others run as if there were none."""

import os
from pathlib import Path

_KEPT = "FEDLOOM_TEST_DATA"  # environment: pytest's workers learn the folder by it
_ABSENT = str(Path(__file__).parent / "no-data-folder")

if _KEPT not in os.environ:
    os.environ[_KEPT] = os.path.abspath(os.environ.get("FEDLOOM_DATA") or "data")
os.environ["FEDLOOM_DATA"] = _ABSENT

FOLDER = Path(os.environ[_KEPT])


def below(path: str) -> bool:
    """Whether a file is in the data folder."""
    return os.path.abspath(path).startswith(f"{FOLDER}{os.sep}")
