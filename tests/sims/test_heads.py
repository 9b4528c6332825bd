"""Heads exchanged between sites: the matrix as table and picture, one pair as a network, and the run's report."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedloom.clients.data import test_images as images_of
from fedloom.clients.data import to_float
from fedloom.clients.data.form import Form
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import Architecture, HeadView, load_network
from fedloom.clients.networks.named import read_split
from fedloom.clients.objectives import resolve
from fedloom.clients.storage.states import read_state
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.server.run_folder.folder import read_config
from fedloom.server.strategies import strategy_of
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.transfer_head import recombined
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.headline import result_tables
from fedloom.sims.report.heads import HeadMatrix, exchanges, heads_figure, heads_table, matrix_table
from fedloom.sims.report.report import write_report
from fedloom.sims.report.results import accuracies, has_aggregate
from fedloom.sims.report.tables import percent
from tests.sims.commands import Command, refused
from tests.sims.pages import checked

A, B, C = "site-0000", "site-0001", "site-0002"
SMALL = ["sites=[{domain: digits, count: 3}]", "data.size=8", "data.grey=true", "engine.name=inline", "rounds=3",
         "training.steps=30", "network.of.widths=[8, 8]", "network.of.strides=[1, 2]", "network.at=block2",
         "network.channels=8", "network.head.widths=[8]", "objective.private=[site-0002]"]  # fmt: skip


def trained(root: Path, *words: str) -> Path:
    simulate(load("components", [*SMALL, f"run.root={root}", *words]), listener=listener_for(quiet=True))
    return root / "components"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes; its last site publishes nothing."""
    return trained(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(done, tmp_path / "components"))


def matrix(run: Path, method: str = "compatible") -> HeadMatrix:
    [one] = [one for one in exchanges(json.loads((run / "summary.json").read_text())) if one.method == method]
    return one


def test_the_matrix_of_every_method_is_shown_with_means_and_bytes(fedloom: Command, done: Path, tmp_path: Path) -> None:
    said = fedloom("heads", done, "--png", tmp_path / "heads.png")
    assert said.code == 0, said.err
    one, alone = matrix(done), matrix(done, "alone")
    assert one.exchanged is not None and one.exchanged > 0.2 + (alone.exchanged or 1.0)
    for each in (one, alone):
        assert f"{each.method}: exchanged {percent(each.exchanged)}, own {percent(each.own)}" in said.out
        assert f"| * {percent(each.of(A, A))} |" in said.out and f"| {percent(each.of(A, B))} |" in said.out
    assert f"| {one.bytes / 1e3:,.1f} | {one.fedavg_bytes / 1e3:,.1f} | {percent(one.share)} |" in said.out
    assert one.share is not None and 0 < one.share < 0.9
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_shows_at_a_glance_that_heads_are_exchanged(done: Path) -> None:
    page, one = checked(done / "report.html"), matrix(done)
    assert "Exchanged heads" in page.text
    assert (
        f"with other sites' heads {percent(one.exchanged)} (alone {percent(matrix(done, 'alone').exchanged)})" in page.text
    )
    assert "the aggregated network" not in page.text
    drawn = {path.stem for path in (done / "plots").iterdir()}
    assert drawn == {"accuracy", "sites", "per_site", "classes", "heads"}
    assert len(page.pictures()) + page.tags.count("svg") == len(drawn)


def test_a_method_without_an_aggregate_stands_with_its_mean_beside_its_baselines(done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    found = accuracies(summary)
    assert not has_aggregate(summary)
    assert list(found) == ["compatible", "alone", A, B]
    assert found["compatible"]["union"] == pytest.approx((found[A]["union"] + found[B]["union"]) / 2)


def test_a_transferred_head_is_a_network_that_is_as_good_as_it_was_measured(
    fedloom: Command, done: Path, tmp_path: Path
) -> None:
    out = tmp_path / "net.safetensors"
    said = fedloom("transfer-head", done, "--from", B, "--to", A, "--out", out)
    assert said.code == 0, said.err
    value = matrix(done).of(A, B)
    assert f"{percent(value)} on {A}'s test examples" in said.out
    assert f"{percent(matrix(done).of(A, A))} on {A}'s test examples" in said.out
    assert "| 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 |" in said.out and "the statistics of each batch" in said.out
    network, name = load_network(out)
    assert read_split(out) == SplitRule.of(read_config(done))
    whose = {"extractor.": read_state(done / "states" / f"{A}.safetensors"),
             "head.": read_state(done / "states" / f"{B}.safetensors")}  # fmt: skip
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, whose[key.partition(".")[0] + "."][key]), key
    config = read_config(done)
    images = images_of(config, config.roster[0].spec)
    with torch.inference_mode():
        right = HeadView(network, slice(0, name.form.outputs), "batch").eval()(to_float(images.x)).argmax(1) == images.y
    assert float(right.float().mean()) == pytest.approx(value, abs=0.1)  # the site has a third of these images


@pytest.mark.parametrize(
    ("giver", "taker", "message"),
    [
        ("site-0009", A, "unknown --from 'site-0009'"),
        (A, "site-000", "unknown --to 'site-000'; did you mean"),
        (C, A, f"site '{C}' has no components in the catalogue: it published none"),
        (A, C, f"site '{C}' has no components in the catalogue: it published none"),
    ],
)
def test_pairs_that_there_are_not(
    fedloom: Command, done: Path, tmp_path: Path, giver: str, taker: str, message: str
) -> None:
    out = tmp_path / "net.safetensors"
    refused(fedloom("transfer-head", done, "--from", giver, "--to", taker, "--out", out), message)
    assert not out.exists()


def test_places_where_nothing_is_written(fedloom: Command, done: Path, tmp_path: Path) -> None:
    pair = ["--from", B, "--to", A]
    (tmp_path / "there.safetensors").write_text("mine")
    refused(fedloom("transfer-head", done, *pair, "--out", tmp_path / "there.safetensors"), "exists already")
    assert (tmp_path / "there.safetensors").read_text() == "mine"
    refused(
        fedloom("transfer-head", done, *pair, "--out", done / "states" / "x.safetensors"), "inside the folder of the run"
    )
    refused(fedloom("heads", done, "--png", done / "x.png"), "--png:", "inside the folder of the run")
    refused(fedloom("heads", done, "--png", tmp_path / "no" / "x.png"), "--png: the folder", "does not exist")
    refused(fedloom("heads", done, "--png", tmp_path / "x.jpg"), "ends in .png")
    refused(fedloom("heads", tmp_path), "is not a run of fedloom")


def test_runs_of_other_methods_have_no_heads(fedloom: Command, finished_run: Path, tmp_path: Path) -> None:
    refused(fedloom("heads", finished_run), "measured no heads")
    pair = ["--from", B, "--to", A, "--out", tmp_path / "net.safetensors"]
    refused(fedloom("transfer-head", finished_run, *pair), "strategy 'sum_aggregation' stores no components of sites")


def test_a_forgotten_site_is_in_no_table_and_gives_nothing(fedloom: Command, run: Path, tmp_path: Path) -> None:
    unlearn(run, UnlearningRequest([B]))
    said = fedloom("heads", run)
    assert said.code == 0 and B not in said.out
    assert "compatible: exchanged" in said.out
    out = tmp_path / "net.safetensors"
    for pair in ((B, A), (A, B)):
        refused(
            fedloom("transfer-head", run, "--from", pair[0], "--to", pair[1], "--out", out), f"'{B}'", "it was forgotten"
        )
    assert fedloom("transfer-head", run, "--from", A, "--to", A, "--out", out).code == 0
    summary = json.loads((run / "summary.json").read_text())
    assert {name: one["sites"] for name, one in summary["recombination"].items()} == {"compatible": [A, C]}
    page = checked(run / "report.html")
    assert "Exchanged heads" in page.text and f"{B} was forgotten" in page.text


def test_a_head_brings_its_own_classes_and_one_that_was_not_measured_says_so(
    fedloom: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    digits = "{domain: digits, classes: [%s], relabel: true}"
    sites = f"sites=[{digits % '0, 1, 2, 3'}, {digits % '1, 2, 3, 4, 5'}]"
    words = [sites, "data.heads=own", "objective.private=[]", "evaluation.sites=1", "baselines=[]", "rounds=1"]
    run, out = trained(tmp_path, *words, "evaluation.statistics=running"), tmp_path / "net.safetensors"
    assert "32.4%" in capfd.readouterr().out
    said = fedloom("transfer-head", run, "--from", B, "--to", A, "--out", out)
    assert said.code == 0, said.err
    assert "| 1, 2, 3, 4, 5 |" in said.out
    assert load_network(out)[1].form.outputs == 5
    said = fedloom("transfer-head", run, "--from", A, "--to", B, "--out", tmp_path / "other.safetensors")
    assert "not measured in this run" in said.out and load_network(tmp_path / "other.safetensors")[1].form.outputs == 4


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["evaluation.statistics=running"], True),
        (["evaluation.statistics=batch"], False),
        (["evaluation.statistics=recomputed"], False),
        (["evaluation.statistics=running", "network.of.norm=group", "network.head.norm=group"], False),
    ],
)
def test_stored_statistics_are_advised_against_where_there_are_some(words: list[str], warned: bool) -> None:
    config = load("components", [*SMALL, *words])
    warnings = strategy_of(resolve(config)).warnings(resolve(config))
    assert [line.startswith("evaluation.statistics=running: stored statistics") for line in warnings] == [True] * warned


def test_parts_that_do_not_fit_are_refused_with_both_shapes() -> None:
    def parts(hidden: int) -> tuple[Architecture, dict[str, torch.Tensor]]:
        one = Architecture(json.dumps({"name": "mlp", "widths": [hidden]}), Form.images(1, 8, 10))
        return one, dict(one.build().state_dict())

    (one, small), (_, large) = parts(5), parts(7)
    extractor, head = ({n: t for n, t in state.items() if n.startswith(part)}
                       for state, part in ((small, "extractor."), (large, "head.")))  # fmt: skip
    with pytest.raises(UserError, match=r"^they do not fit: 'head.weight' is 10 x 7, the network takes 10 x 5$"):
        recombined(extractor, head, one, "they do not fit")


def exchange(method: str, sites: int, lacking: bool = False) -> HeadMatrix:
    """0.9 on the diagonal, 0.5 elsewhere."""
    cells = [[None if lacking and row else 0.9 if row == column else 0.5 for column in range(sites)] for row in range(sites)]
    return HeadMatrix(method, [f"site-{place:04d}" for place in range(sites)], cells, 1000, 20_000)


def test_means_leave_out_what_was_not_measured() -> None:
    whole, part = exchange("compatible", 3), exchange("compatible", 3, lacking=True)
    assert (whole.own, part.own) == (pytest.approx(0.9), 0.9)
    assert whole.exchanged == part.exchanged == pytest.approx(0.5)
    assert exchange("alone", 1).exchanged is None
    assert part.of("site-0001", "site-0000") is None and part.of("site-0009", "site-0000") is None
    assert heads_table([whole]).rows == [["compatible", "90.0%", "50.0%", "1.0", "20.0", "5.0%"]]
    assert whole.without(["site-0001"]).sites == ["site-0000", "site-0002"]


@pytest.mark.parametrize("sites", [1, 2, 12, 13, 40])
def test_heat_maps_of_all_methods_share_a_scale(sites: int) -> None:
    figure = heads_figure([exchange("compatible", sites), exchange("alone", sites, lacking=True)], {})
    assert figure is not None
    panels = [axes for axes in figure.axes if axes.images and axes.get_xlabel()]
    assert [axes.get_xlabel().partition(":")[0] for axes in panels] == ["compatible", "alone"]
    assert all(axes.images[0].get_clim() == (0.0, 1.0) for axes in panels)
    assert len(panels[0].texts) == (sites * sites if sites <= 12 else 0)
    assert heads_figure([], {}) is None


def test_a_matrix_of_many_sites_is_cut_and_says_so() -> None:
    table = matrix_table(exchange("compatible", 40), {"site-0000": "usps"})
    assert len(table.columns) == 13 and len(table.rows) == 20
    assert table.rows[0][:3] == ["site-0000 (usps)", "* 90.0%", "50.0%"]
    assert "The first 20 of 40 extractors" in table.note and "The first 12 of 40 heads" in table.note


@pytest.mark.parametrize("broken", [{"sites": [A]}, {"accuracy": [[0.1]]}, {"sites": 3}])
def test_a_damaged_summary_is_reported_in_one_line(fedloom: Command, run: Path, broken: dict) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["recombination"]["compatible"] |= broken
    (run / "summary.json").write_text(json.dumps(summary))
    refused(fedloom("heads", run), "results are damaged")
    with pytest.raises(UserError, match="damaged"):
        write_report(run)


def test_what_networks_cost_is_not_a_table_where_nothing_was_measured() -> None:
    """Once sites with extractors of their own had one without a row."""
    found = {"at_sites": {"compatible": {"own": 0.5}}, "costs": {}}
    assert [table.title for table in result_tables(found)] == ["At the sites"]
