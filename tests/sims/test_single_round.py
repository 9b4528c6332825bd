"""Plots over rounds of a run with one round: bars, since a curve of one point is all but invisible."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fedloom.conf import load
from fedloom.conf.metrics import facts_of
from fedloom.sims.comparison import compare
from fedloom.sims.comparison.curves import figure_of
from fedloom.sims.desk.curves import chart
from fedloom.sims.desk.rendering import TEMPLATES
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.report.canvas import save
from fedloom.sims.report.curves import MOST_BARS, accuracy_figure
from fedloom.sims.report.drawing import figure_with_boxes
from tests.sims.commands import SMALL


def record(round: int, **scores: float) -> dict[str, Any]:
    return {"round": round, "accuracy": scores}


def bars(axes: Axes) -> dict[str, float]:
    names = [label.get_text() for label in axes.get_yticklabels()]
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return dict(zip(names, [patch.get_width() for patch in patches], strict=True))


def test_one_round_is_drawn_as_bars_which_a_page_can_hide(tmp_path: Path):
    figure = accuracy_figure([record(0), record(3, a=0.5, b=0.25, union=0.4)], {"fedavg": [record(3, union=0.3)], "x": []})
    assert figure is not None
    (axes,) = figure.axes
    assert bars(axes) == {"union": 0.4, "a": 0.5, "b": 0.25, "fedavg": 0.3}
    assert [text.get_text() for text in axes.texts] == ["40.0%", "50.0%", "25.0%", "30.0%"]
    assert axes.get_xlabel() == "validation accuracy (grey: baselines and other architectures, on the union)"
    assert figure.get_suptitle() == "Validation accuracy of the aggregated network after round 3"
    drawn = figure_with_boxes(save(figure, tmp_path / "a.png", ["svg"]).with_suffix(".svg"), "c")
    assert all(drawn.count(f'class="curve-{number}"') == 2 for number in range(4))


def test_of_many_domains_in_one_round_the_union_the_best_and_the_worst_are_drawn():
    scores = {f"d{number:02}": number / 100 for number in range(MOST_BARS + 5)}
    figure = accuracy_figure([record(1, **scores, union=0.1)])
    assert figure is not None
    assert bars(figure.axes[0]) == {"union": 0.1, "worst: d00": 0.0, "best: d28": 0.28}


def test_a_curve_of_one_point_among_others_has_a_large_marker():
    figure = accuracy_figure([record(n, union=n / 9) for n in range(1, 4)], {"short": [record(1, union=0.2)]})
    assert figure is not None
    sizes = {np.size(line.get_xdata()): line.get_markersize() for line in figure.axes[0].lines}
    assert sizes == {3: 4, 1: 8}


@pytest.mark.slow
def test_a_comparison_of_runs_with_one_round_has_bars_and_its_page_says_so(tmp_path: Path):
    for mode in ("exact", "fedavg"):
        for seed in (0, 1):
            words = [f"run.root={tmp_path}", f"run.name={mode}{seed}", f"objective.mode={mode}", f"seed={seed}"]
            simulate(load("digits", [*SMALL, "rounds=1", "baselines=[]", *words]))
    comparison = compare(tmp_path)
    figure = figure_of(comparison.groups, lambda entry: dict.fromkeys(entry.curve, 1.0), "round")
    assert list(bars(figure.axes[0])) == ["mode=exact", "mode=fedavg"]
    means = {group.label: sum(entry.curve[1] for entry in group.entries) / 2 for group in comparison.groups}
    assert bars(figure.axes[0]) == pytest.approx(means)
    traffic = figure_of(comparison.groups, lambda entry: dict.fromkeys(entry.curve, 1.0), "MB")
    assert {line.get_markersize() for line in traffic.axes[0].lines} == {8}
    page = comparison.write(tmp_path / "page.html").read_text()
    assert "mean over seeds. Line: one standard deviation." in page


@pytest.mark.parametrize(("points", "radius"), [({1: 0.5}, "6"), ({1: 0.5, 2: 0.6}, "3.5")])
def test_the_desk_draws_a_single_round_as_a_large_dot(points: dict[int, float], radius: str):
    drawn = chart("accuracy", {"union": list(points.items())}, facts_of("accuracy"))
    macro: Any = TEMPLATES.get_template("macros.html").module
    assert f'r="{radius}"' in macro.chart(drawn)
