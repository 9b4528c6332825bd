"""The notebook that goes from a configuration to pictures and a fused network, run as a user runs it."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "sims" / "experiments" / "first_steps.ipynb"


@pytest.mark.slow
def test_first_steps(tmp_path: Path):
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # as it is kept
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert sum("image/png" in data for data in shown) == 3
    first, *_, last = (data for data in shown if "text/html" in data)
    assert "site-0002" in first["text/html"] and "site-0002" not in last["text/html"]
    accuracy: dict[str, Any] = next(
        ast.literal_eval(data["text/plain"]) for data in shown if "'fused'" in data.get("text/plain", "")
    )
    assert accuracy["fused"] > max(accuracy["deep"], accuracy["shallow"]) + 0.05
    assert (tmp_path / "runs/first-steps/report.html").is_file()
