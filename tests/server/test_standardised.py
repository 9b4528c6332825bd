"""data.standardise: mean and deviation over all sites' examples, exact whatever joins and leaves; sites' own; refusals."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedloom.clients.data import site_examples
from fedloom.clients.data.standardise import (
    STANDARDISATION,
    STATISTICS,
    Standardisation,
)
from fedloom.clients.evaluation.questions import answer_question
from fedloom.clients.job import Job
from fedloom.clients.objectives import resolve
from fedloom.clients.privacy.limits import Limits
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import ASK, METRICS, TaskInstructions, read_order, to_arrays, to_states
from fedloom.clients.storage.states import read_state
from fedloom.clients.storage.store import SiteStore
from fedloom.conf import Config, UserError
from fedloom.conf.loading import load_text
from fedloom.fusion.state import digest
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger.audit import check
from fedloom.server.run.checks import check as check_config
from fedloom.server.run.training_run import TrainingRun, open_ledger
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.operations.verify import verify_certificate
from fedloom.sims.result import Result
from tests.server.kills import TRAPS, begun, last_round
from tests.server.parts import Recorder, WatchedApp, folder, one_thread, small
from tests.server.resumes import Stopped, Stopper, results, resumed, run
from tests.server.runs import method_of

SITES = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    one_thread()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sklearn.datasets import load_breast_cancer, load_diabetes

    path = tmp_path_factory.mktemp("tables")
    cancer = load_breast_cancer(as_frame=True).frame  # pyright: ignore
    cancer["constant"] = 7.0
    cancer.to_csv(path / "cancer.csv", index=False)
    diabetes = load_diabetes(as_frame=True, scaled=False).frame  # pyright: ignore
    diabetes.to_csv(path / "diabetes.csv", index=False)
    return path


def configured(root: Path, table: Path, *overrides: str, query: str = "") -> Config:
    text = f"""
sites: [{{domain: "table:{table}{query}", count: {SITES}}}]
network: {{name: mlp, widths: [16]}}
objective: fedavg
strategy: fedavg
rounds: 3
engine: inline
"""
    return load_text(text, "rows", [f"run.root={root}", "run.name=rows", *overrides])


def statistics(method: TrainingRun) -> Standardisation:
    by = method.state.features.current()
    assert by is not None
    return by


def trained(method: TrainingRun, rounds: int | None = None) -> None:
    method.train(method.joined(InlineGrid(SITES, store_folder(method.config))), Recorder(), rounds)


def pooled(config: Config, names: list[str]) -> np.ndarray:
    return np.concatenate(
        [site_examples(config, site).x.numpy() for site in config.roster if site.name in names]
    ).astype(np.float64)  # fmt: skip


def test_a_site_that_claims_more_rows_than_it_has_is_dropped(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv")
    with method_of(config) as method:
        grid = InlineGrid(SITES, store_folder(config), QuestionApp(claiming, place=1))
        method.train(method.joined(grid), listener := Recorder(), 1)
        assert any("'inputs.count' is more than the site's" in line for line in listener.messages)
        assert [method.state.slots.has(STATISTICS, site.name) for site in config.roster] == [True, False, True]


class QuestionApp(WatchedApp):
    """The real ClientApp, but the answers of the site at `place` to questions go through `fault`."""

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        mine = message.metadata.message_type == ASK and read_order(message.content).site == self.place
        return self.fault(reply) if mine and self.fault else reply


def claiming(reply: Message) -> Message:
    if STATISTICS in reply.content.array_records:
        state = to_states(RecordDict({STATISTICS: reply.content.array_records[STATISTICS]}))[STATISTICS]
        reply.content[STATISTICS] = to_arrays({**state, "inputs.count": torch.tensor([2**39])})
    return reply


def test_three_sites_train_and_statistics_are_those_of_all_examples(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv", "training.rate=0.1", "rounds=5")
    listener = Recorder()
    summary = run(config, listener)
    assert all(record["replies"] == SITES and not record["dropped"] for record in listener.records)
    assert summary["accuracy"]["fedavg"]["union"] > 0.9
    assert all(summary["checks"].values()) and check(folder(config)) == []
    by = Standardisation.parsed(read_state(folder(config) / f"{STANDARDISATION}.safetensors"))
    numbers = pooled(config, [site.name for site in config.roster])
    assert by.inputs is not None and by.targets is None
    assert np.allclose(by.inputs[0], numbers.mean(0), rtol=1e-6)
    assert np.allclose(by.inputs[1], numbers.std(0), rtol=1e-6)
    changed = by.of_inputs(site_examples(config, config.roster[0]).x)
    assert float(by.inputs[1][-1]) == 0.0 and not changed[:, -1].any()  # the constant column


def test_forgetting_a_site_leaves_the_statistics_of_a_run_without_it(tables: Path, tmp_path: Path):
    config = configured(tmp_path / "all", tables / "cancer.csv")
    names = [site.name for site in config.roster]
    with method_of(config) as method:
        trained(method)
        method.state.membership.forget([names[1]], {})
        assert any("standardised" in trace.reason for trace in method.state.residue([names[1]]))
        left = statistics(method)
        assert all(method.state.checks()[0].values())
        method.state.readmit([names[1]])
        assert torch.equal(statistics(method).state()["inputs.mean"], left.state()["inputs.mean"])
    assert check(folder(config)) == []
    other = configured(tmp_path / "without", tables / "cancer.csv")
    there = RunFolder(folder(other))
    there.open(other)
    with open_ledger(other, there, sites=[names[0], names[2]]) as ledger:
        method = TrainingRun(other, there, ledger, Evaluator(other))
        trained(method, 1)
        assert digest(statistics(method).state()) == digest(left.state())
    assert left.inputs is not None
    assert np.allclose(left.inputs[0], pooled(config, [names[0], names[2]]).mean(0), rtol=1e-6)


def test_a_site_that_does_not_train_leaves_nothing_and_is_asked_again(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv")
    names = [site.name for site in config.roster]
    with method_of(config) as method:
        grid = InlineGrid(SITES, store_folder(config), WatchedApp(faulty, place=1, rounds=[1]))
        method.train(method.joined(grid), listener := Recorder(), 1)
        assert list(listener.records[0]["dropped"]) == [names[1]]
        assert [method.state.slots.has(STATISTICS, name) for name in names] == [True, False, True]
        method.train(method.joined(grid), Recorder(), 2)
        assert all(method.state.slots.has(STATISTICS, name) for name in names)
        inputs = statistics(method).inputs
        assert inputs is not None and np.allclose(inputs[0], pooled(config, names).mean(0), rtol=1e-6)


def faulty(reply: Message) -> Message:
    del reply.content[METRICS]
    return reply


def test_a_certificate_and_a_network_are_measured_as_in_the_run(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv", "training.rate=0.1")
    run(config)
    result = Result(folder(config))
    assert result.measure(result.networks["fedavg"]) == result.accuracy["fedavg"]
    unlearn(folder(config), UnlearningRequest([config.roster[1].name], "r1"))
    verification = verify_certificate(folder(config) / CERTIFICATES / "r1.json", folder(config))
    assert verification.good, verification.table.rows


def test_a_resumed_run_has_equal_bits(tables: Path, tmp_path: Path):
    whole, halved = (configured(tmp_path / name, tables / "cancer.csv", "federation.fraction=0.6") for name in "ab")
    run(whole)
    with pytest.raises(Stopped):
        run(halved, Stopper(1))
    resumed(halved)
    assert results(folder(whole)) == results(folder(halved))
    files = [(folder(config) / f"{STANDARDISATION}.safetensors").read_bytes() for config in (whole, halved)]
    assert files[0] == files[1]


@pytest.mark.parametrize("trap", [("before commit", 3), ("after commit", 3)])
def test_a_killed_run_has_equal_bits(tables: Path, tmp_path: Path, trap: tuple[str, int]):
    assert trap[0] in TRAPS
    whole, killed = (configured(tmp_path / name, tables / "cancer.csv") for name in "ab")
    run(whole)
    process = begun(killed, trap)
    process.join(120)
    assert process.exitcode == -9 and (last_round(killed) or 0) < 3
    resumed(killed)
    files = [(folder(config) / f"{STANDARDISATION}.safetensors").read_bytes() for config in (whole, killed)]
    assert files[0] == files[1]
    assert results(folder(whole))["rounds"] == results(folder(killed))["rounds"]


def test_predictions_are_in_the_unit_of_the_targets(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "diabetes.csv", "training.rate=0.1", "training.epochs=4", "rounds=8",
                        "evaluation.every=100", query="?task=regression")  # fmt: skip
    with method_of(config) as method:
        grid, listener = InlineGrid(SITES, store_folder(config)), Recorder()
        method.train(method.joined(grid), listener, 7)
        assert all(record["train_loss"] < 3 for record in listener.records)  # in deviations
        evaluator = method.evaluator
        label = next(iter(evaluator.specs))
        view, images = (
            evaluator.head_view(evaluator.loaded(method.state.aggregate()), label),
            evaluator.images(label, "test"),
        )
        with torch.no_grad():
            predicted = view(images.x)
        rmse = float((predicted - images.y).square().mean().sqrt())
        spread = float((images.y - images.y.mean()).square().mean().sqrt())
        assert images.y.mean() > 100 and 30 < rmse < 0.95 * spread
        assert statistics(method).targets is not None


@pytest.mark.parametrize("way", ["sites", "site"])
def test_results_predict_evaluate_and_measure_in_the_unit_of_the_targets(tables: Path, tmp_path: Path, way: str):
    config = configured(tmp_path, tables / "diabetes.csv", "training.rate=0.1", "rounds=4", "evaluation.where=sites",
                        f"data.standardise={way}", query="?task=regression")  # fmt: skip
    run(config)
    result, site = Result(folder(config)), config.roster[1].name
    examples = result.examples(site)
    predicted = result.predict(examples.x, site=site)
    assert abs(float(predicted.mean() - examples.y.mean())) < 50 < float(predicted.mean())
    assert torch.equal(result.predict(examples.x.double(), site=site), predicted)
    found = result.evaluate(examples, site=site)
    assert found["rmse"] == pytest.approx(float((predicted - examples.y).square().mean().sqrt()), rel=1e-6)
    assert found["rmse"] == pytest.approx(result.per_site["aggregate"]["sites"][site]["scores"]["rmse"], rel=1e-6)
    if way == "sites":
        measured = result.measure(result.network)
        assert measured == pytest.approx(result.scores["rmse"]["fedavg"], rel=1e-6)
    else:
        with pytest.raises(UserError, match=r"site: data\.standardise is site, so name the site"):
            result.predict(examples.x)


def test_a_site_can_use_its_own_mean(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv", "data.standardise=site", "evaluation.where=sites",
                        "training.rate=0.1", "rounds=4")  # fmt: skip
    summary = run(config)
    assert summary["accuracy"]["fedavg"]["union"] > 0.85
    assert set(summary["digest"]) == {"networks"} and not (folder(config) / f"{STANDARDISATION}.safetensors").exists()


def test_images_are_sent_no_statistics_and_have_no_slot(tmp_path: Path):
    config = small(tmp_path, "rounds=1")
    with method_of(config) as method:
        assert resolve(config).standardise == "none"
        assert list(method.state.slots.declared) == ["sum"]
        assert method.state.features.records() == {} and method.state.features.current() is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["privacy.noise=1", "privacy.clip=1"],
            r"data\.standardise: 'sites' reads sums .* privacy\.noise adds no noise; set .*=none, or .*=sites",
        ),
        (["federation.partial_sums=true"], r"data\.standardise: 'sites' needs a slot of its own"),
        (["data.standardise=site"], r"data\.standardise: with 'site', only a site knows .* set evaluation\.where=sites"),
    ],
)
def test_what_cannot_be_combined_is_refused(tables: Path, tmp_path: Path, words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        check_config(configured(tmp_path, tables / "cancer.csv", *words))


def test_images_cannot_be_standardised(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.standardise: 'sites' is for features, .* set data\.standardise=none"):
        check_config(small(tmp_path, "data.standardise=sites"))


def test_a_site_that_hides_what_it_sends_refuses_the_question(tables: Path, tmp_path: Path):
    config = configured(tmp_path, tables / "cancer.csv")
    order = TaskInstructions("0" * 64, "run", 0, 1, 1, 0, SITES, kind=STATISTICS)
    with pytest.raises(RefusedError, match="asks for more than sums"):
        Policy(epsilon=1.0).check_question(order, config)


def test_a_real_site_discloses_no_sums_of_few_rows(tmp_path: Path):
    replies = {}
    for rows in (5, 20):
        table = np.random.default_rng(rows).normal(size=(rows + 3, 2))
        lines = "".join(f"{a},{b},{row % 2}\n" for row, (a, b) in enumerate(table))
        (tmp_path / f"{rows}.csv").write_text("a,b,target\n" + lines, encoding="utf-8")
        words = ["data.form={kind: features, shape: [2]}", "data.classes=2", "evaluation.where=sites",
                 "sites.0.partition={min_samples: 1}"]  # fmt: skip
        config = configured(tmp_path, tmp_path / f"{rows}.csv", *words)
        order = TaskInstructions("0" * 64, "run", 0, 1, 1, 0, SITES, kind=STATISTICS)
        policy = Policy(domain=f"table:{tmp_path}/{rows}.csv", limits=Limits(100, 1.0, 1))
        experiment = resolve(policy.apply(config, 0))
        job = Job(order, experiment, SiteStore(tmp_path / "store", "run", "a"), RecordDict(), policy, simulated=False)
        try:
            replies[rows] = answer_question(job)
        except RefusedError as error:
            replies[rows] = str(error)
    assert "fewer than 8 would disclose single ones" in replies[5]
    assert STATISTICS in replies[20].array_records


def test_ray_gives_the_same_bits(tables: Path, tmp_path: Path):
    from fedloom.sims.operations.simulate import simulate

    config = configured(tmp_path / "inline", tables / "cancer.csv")
    run(config)
    engine = dataclasses.replace(config.engine, name="ray", workers=2)
    place = dataclasses.replace(config.run, root=str(tmp_path / "ray"))
    other = dataclasses.replace(config, engine=engine, run=place)
    simulate(other)
    one, two = results(folder(config)), results(folder(other))
    assert one["states"] == two["states"] and one["rounds"][-1].digest == two["rounds"][-1].digest
