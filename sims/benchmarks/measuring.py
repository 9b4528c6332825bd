"""What benchmarks share: measurements in fresh processes, tables from rows, small helpers."""

import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.conf.errors import FailedError
from fedloom.sims.report.tables import Table

MIB = 2**20
VERDICTS = {True: "met", False: "not met", None: "-"}


def fresh(function: str, *arguments: Any) -> Any:
    """Call `module:function` of this folder in a new process and return its result; both travel as JSON.

    Raises FailedError with the last line that the process wrote.
    """
    command = [sys.executable, "-P", "-m", __name__, function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FailedError(f"{function}{arguments} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], note: str = "") -> Table:
    """Return a table with a line for each row.

    Args:
        columns: The text of a cell by heading: a format string over the row's keys, such as "{seconds:.2f}". It gives "-"
            for a value that is None. The key `met` reads "met" or "not met".
    """
    lines = [[cell(text, {**row, "met": VERDICTS[row.get("met")]}) for text in columns.values()] for row in rows]
    return Table(title, list(columns), lines, note)


def cell(text: str, row: Mapping[str, Any]) -> str:
    """Return a format string filled from a row; "-" if its value is None."""
    try:
        return text.format_map(row)
    except TypeError:  # a format such as .2f, and None
        return "-"


def small_sites(count: int) -> str:
    """Return the override for `count` sites that share scikit-learn's digits; some have a single image."""
    return f"sites=[{{domain: digits, count: {count}, partition: {{min_samples: 1}}}}]"


def flower_app(folder: Path, components: Mapping[str, str], job: str) -> Path:
    """Write a Flower app whose run-config has the key `job` into a new folder, and return the folder.

    Args:
        components: "module:attribute" of the `serverapp` and the `clientapp`.
    """
    folder.mkdir(parents=True)
    project = {"name": "fedloom-bench", "version": "1.0.0", "description": "", "license": "Apache-2.0"}
    app = {"publisher": "fedloom", "components": dict(components), "config": {"job": job}}
    (folder / "pyproject.toml").write_text(
        tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}), encoding="utf-8"
    )
    return folder


def nbytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors of a state."""
    return sum(tensor.nbytes for tensor in state.values())


def peak_mib() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    measure = getattr(importlib.import_module(f"fedloom.sims.benchmarks.{module}"), name)
    print(json.dumps(measure(*json.loads(sys.argv[2]))))
