"""Reports, tables and comparisons of metrics whose smaller values are better, and of predicted against true numbers."""

from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle

from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.evaluation.metrics.chosen import Metric, Metrics
from fedloom.conf.metrics import CLASS, KNOWN, MULTILABEL, REGRESSION, facts_of
from fedloom.server.evaluation.spread import spread_of_metrics
from fedloom.server.run_folder.scores import first_metric, headline, metric_of
from fedloom.sims.report.canvas import save
from fedloom.sims.report.curves import accuracy_figure
from fedloom.sims.report.errors import against_figure, by_class_table, confusion_figure, confusion_table
from fedloom.sims.report.forgetting import caption, forgetting_table
from fedloom.sims.report.headline import closing_lines
from fedloom.sims.report.headline import headline as sentence
from fedloom.sims.report.plots import draw_all, sites_figure
from fedloom.sims.report.results import accuracy_table
from fedloom.sims.report.sites import sites_table, spread_figure, spread_table
from fedloom.sims.tracking.numbers import round_numbers

SITES = {"a": 1.0, "b": 4.0}  # the deviation of each site's errors


@pytest.fixture
def summary():
    """Return the summary of a run on numbers, with two sites of one domain."""
    metrics = Metrics(REGRESSION, tuple(Metric(KNOWN[name], REGRESSION) for name in ("rmse", "mae", "r2")))
    generator, scores = torch.Generator().manual_seed(2), dict[str, Score]()
    for name, size in SITES.items():
        true = 40 + 10 * torch.randn(200, 1, generator=generator)
        predicted = true + size * torch.randn(200, 1, generator=generator)
        scores[name] = Score(0, 200, sums=metrics.sums(predicted, true))
    union = metrics.values(metrics.added([score.sums for score in scores.values()]))
    table = {name: {"sum": {"houses": value, "union": value}} for name, value in union.items()}
    return {
        "status": "finished", "method": "fedavg", "rounds": 2, "aggregate": "sum", "accuracy": {}, "scores": table,
        "metric": {"name": "rmse", "higher_is_better": False, "share": False},
        "sites": [{"name": name, "domain": "houses", "samples": 9} for name in SITES],
        "per_site": {"aggregate": spread_of_metrics(scores, metrics, {})},
        "forgotten": {"a": {"houses": 5.0, "union": 5.0}},
    }  # fmt: skip


RECORDS = [{"round": round, "scores": {"rmse": {"houses": 9.0 / round, "union": 9.0 / round}, "r2": {"union": 0.5}}}
           for round in (1, 2)]  # fmt: skip


def test_the_union_of_sites_has_the_errors_of_both(summary):
    rmse = summary["scores"]["rmse"]["sum"]["union"]
    assert rmse == pytest.approx((0.5 * (SITES["a"] ** 2 + SITES["b"] ** 2)) ** 0.5, rel=0.1)
    per_site = summary["per_site"]["aggregate"]
    assert per_site["worst"]["site"] == "b" and per_site["best"]["site"] == "a"
    assert per_site["union"]["scores"]["rmse"] == rmse


def test_texts_have_the_metric_and_its_direction(summary):
    rmse = summary["scores"]["rmse"]["sum"]["union"]
    assert f"reaches {rmse:#.4g} test RMSE on houses" in sentence(summary, RECORDS)
    assert "Test RMSE" in accuracy_table(summary).plain() and f"{rmse:#.4g}" in accuracy_table(summary).plain()
    assert "RMSE on its own domain should rise" in caption({**summary, "sites": summary["sites"][:1]})
    assert f"{rmse:#.4g} → 5" in forgetting_table(summary).plain()
    assert [row[0] for row in sites_table(summary).rows] == ["b", "a"]
    assert "%" not in "".join(str(cell) for row in spread_table(summary).rows for cell in row)


def test_pictures_show_predicted_against_true_numbers_per_site_and_over_sites(summary, tmp_path):
    figure = against_figure(summary)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()] == ["sum, all sites", "a", "b"]
    assert confusion_figure(summary) is None and confusion_table(summary) == []
    names = {path.name for path in draw_all(tmp_path, RECORDS, summary)}
    assert {"accuracy.png", "against.png", "per_site.png", "forgetting.png"} <= names
    assert "sites.png" not in names  # one network on one domain: a heat map of one number


def test_without_classes_there_is_one_panel_and_sites_without_a_value_are_counted(summary):
    figure = spread_figure(summary)
    assert figure is not None and len(figure.axes) == 1
    assert "Mean over" not in spread_table(summary).note
    summary["per_site"]["aggregate"]["sites"]["a"]["score"] = None
    assert "Mean over 1 of 2 sites (others' examples do not define it" in spread_table(summary).note


def test_balanced_accuracy_of_a_class_is_recall():
    by_class = {"balanced_accuracy": {"0": 0.5}, "f1": {"0": 0.25}}
    summary = {"per_site": {"aggregate": {"union": {"by_class": by_class}}}, "aggregate": "sum"}
    assert by_class_table(summary)[0].columns == ["class", "recall", "F1"]
    by_class["recall"] = {"0": 0.5}
    assert by_class_table(summary)[0].columns == ["class", "F1", "recall"]


def test_records_have_the_first_metric_and_trackers_all():
    assert headline(RECORDS[0]) == {"houses": 9.0, "union": 9.0} and first_metric(RECORDS[0]).title == "RMSE"
    assert metric_of({}, RECORDS) == facts_of("rmse") and metric_of({}) == facts_of("accuracy")
    assert round_numbers(RECORDS[1]) == {
        "validation/houses": 4.5, "validation/union": 4.5, "validation/r2/union": 0.5,
    }  # fmt: skip
    figure = accuracy_figure(RECORDS)
    assert figure is not None and figure.axes[0].get_ylabel() == "validation RMSE"


def test_the_last_lines_have_all_metrics_and_warn_of_classes_that_are_never_predicted(summary):
    values = {name: table["sum"]["union"] for name, table in summary["scores"].items()}
    assert closing_lines(summary) == [
        f"sum, test on houses: RMSE {values['rmse']:#.4g}, MAE {values['mae']:#.4g}, R2 {values['r2']:#.4g}"
    ]
    for kind, names, targets in (
        (CLASS, ["f1"], torch.arange(40) % 3),
        (MULTILABEL, ["f1", "auroc"], torch.ones(40, 3)),
    ):
        metrics = Metrics(kind, tuple(Metric(KNOWN[name], kind) for name in names))
        sums = metrics.sums(torch.tensor([1.0, 2.0, -9.0]).expand(40, 3), targets)
        classes = {0: (0, 13), 1: (13, 13), 2: (0, 14)} if kind == CLASS else {}
        found = spread_of_metrics({"a": Score(0, 40, classes, sums)}, metrics, {})
        (line,) = closing_lines({"per_site": {"aggregate": found}, "class_names": {"2": "rare"}})
        never = "classes `0`, `rare` are" if kind == CLASS else "label `rare` is"
        assert line == f"Warning: {never} never predicted on the test examples."
    classes = {"0": [9, 9], "1": [0, 7], "2": [0, 1]}
    assert closing_lines({"per_site": {"own": {"classes": classes}}}) == [
        "Warning: no test example of class `1` is recognised."
    ]


@pytest.mark.parametrize("name", ["accuracy", "auroc", "r2", "perplexity"])
def test_an_axis_ends_at_the_largest_possible_value_of_its_metric(name: str):
    metric, best = facts_of(name), 1.0
    values = [best + (0.3 if name == "perplexity" else -0.3) / (number + 1) for number in range(5)] + [best]
    records = [{"round": number, "metric": {"name": name}, "scores": {name: {"digits": value, "union": value}},
                **({"accuracy": {"digits": value, "union": value}} if name == "accuracy" else {})}
               for number, value in enumerate(values)]  # fmt: skip
    figure = accuracy_figure(records)
    assert figure is not None
    low, high = figure.axes[0].get_ylim()
    worst = [tick for tick in figure.axes[0].get_yticks() if low <= tick <= high]
    assert min(worst) >= metric.bounds[0] and max(worst) <= metric.bounds[1]
    assert low <= min(values) and high >= max(values)


def test_a_single_network_on_several_domains_is_drawn_as_bars(tmp_path: Path):
    figure = sites_figure({"accuracy": {"sum": {"a": 0.5, "b": 1.0, "union": float("nan")}}})
    assert figure is not None
    (axes,) = figure.axes
    assert not axes.images and [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)][:2] == [0.5, 1.0]
    assert [text.get_text() for text in axes.texts] == ["50.0%", "100.0%"] and axes.get_xlabel() == "test accuracy of sum"
    assert axes.get_xlim()[1] < 1.02
    save(figure, tmp_path / "sites.png")
