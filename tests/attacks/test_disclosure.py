"""What a site lets a server hear, spend and use up: its own machine decides, whatever the server's configuration says."""

import multiprocessing
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.app import app
from fedloom.clients.job import alone
from fedloom.clients.privacy.differential import discrete_gaussian, epsilon
from fedloom.clients.privacy.memory import Memory
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import EVALUATE, MEAN, METRICS, MODEL, ROUND, SITE, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.conf import UserError, load
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import site_context, store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.attacks.hostile import MASKS, WORDS, Masks, Refused, Server, name_of, summed
from tests.server.parts import Recorder, small

NOISE = (*WORDS, "privacy.clip=1", "privacy.noise=2")


def trained(server: Server, **parts: Any) -> Mapping[str, Any]:
    """What site 0 reports of a round."""
    return dict(server.ask(0, TRAIN, {MEAN: server.mean}, **parts)[METRICS])  # type: ignore[arg-type]


def test_losses_do_not_leave_where_something_is_hidden(tmp_path: Path) -> None:
    """An exact loss on a network of the server's choice tells an image, some pixels a question."""
    plain = Server(tmp_path / "plain", WORDS)
    assert {"loss", "samples"} <= trained(plain).keys()
    for name, words, policy in [("masks", MASKS, {"masks": "required"}), ("config", MASKS, {}), ("noise", NOISE, {}),
                                ("epsilon", NOISE, {"epsilon": 100.0})]:  # fmt: skip
        server = Server(tmp_path / name, words, min_batch=1, **policy)
        found = Masks(server, range(10)).begin().train().metrics[0] if words is MASKS else trained(server)
        assert "loss" not in found and found["samples"] > 0
    assert "loss" in trained(Server(tmp_path / "shown", NOISE, disclose="scores"))


@pytest.mark.parametrize(
    ("words", "policy"),
    [(MASKS, {"masks": "required"}), (NOISE, {"epsilon": 9.0}), (MASKS, {}), (NOISE, {}), (WORDS, {"masks": "required"}),
     (WORDS, {"epsilon": 9.0})],
)  # fmt: skip
def test_scores_do_not_leave_where_something_is_hidden(tmp_path: Path, words: Any, policy: Any) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [({}, False), ({"disclose": "scores"}, True)]
    for more, shown in cases:
        server = Server(tmp_path / str(shown), words, **policy, **more)
        reply = server.reply(0, EVALUATE, {MODEL: server.mean}, split="validation")
        assert reply.has_error() is not shown
        if not shown:
            assert reply.error.reason == "RefusedError at order.kind; the site's own log says more"


@pytest.mark.parametrize("engine", ["inline", "ray", "flower"])
def test_numbers_by_class_leave_when_the_site_says_so_whatever_engine_the_server_names(tmp_path: Path, engine: str) -> None:
    words = (*WORDS, f"engine.name={engine}", "evaluation.classes=true", "engine.address=federation")
    cases: list[tuple[dict[str, Any], bool]] = [({}, False), ({"disclose": "classes"}, True)]
    for more, shown in cases:
        server = Server(tmp_path / str(shown), words, **more)
        found = server.ask(0, EVALUATE, {MODEL: server.mean}, split="validation")[METRICS]
        assert any(name.startswith("by_class") for name in found) is shown  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("disclose", "sent"), [("", {"right"}), ("scores", {"right"}), ("classes", {"right", "confusion", "scores"})]
)
def test_confusion_matrices_and_histograms_leave_only_when_the_site_discloses_classes(
    tmp_path: Path, disclose: str, sent: set[str]
) -> None:
    words = (*WORDS, "evaluation.metrics=[balanced_accuracy,auroc]", "evaluation.where=sites")
    policy: dict[str, Any] = {"disclose": disclose} if disclose else {}
    server = Server(tmp_path, words, **policy)
    found = server.ask(0, EVALUATE, {MODEL: server.mean}, split="validation")
    assert set(found["sums"].keys()) == sent  # type: ignore[union-attr]


def test_a_site_does_not_import_a_metric_that_the_server_names(tmp_path: Path) -> None:
    words = (*WORDS, "evaluation.metrics=[accuracy,'no_such_module:Metric']", "evaluation.where=sites")
    server = Server(tmp_path, words, disclose="classes")
    found = server.ask(0, EVALUATE, {MODEL: server.mean}, split="validation")
    assert "sums" not in found and "right" in found[METRICS]  # type: ignore[operator]


def test_small_batches_are_refused_where_something_is_hidden(tmp_path: Path) -> None:
    words = (*NOISE, "training.batch=1", "training.steps=1")
    with pytest.raises(Refused, match=r"RefusedError at training\.batch"):
        trained(Server(tmp_path / "a", words, epsilon=100.0))
    trained(Server(tmp_path / "b", words, epsilon=100.0, min_batch=1))


@pytest.mark.parametrize("name", ["training.steps=1000000000", "training.epochs=100000000",
                                  "network={name: mlp, widths: [200000, 200000]}"])  # fmt: skip
def test_what_an_order_costs_has_limits(tmp_path: Path, name: str) -> None:
    server = Server(tmp_path, WORDS)
    mean = server.mean
    server.change(*WORDS, name)
    with pytest.raises(Refused, match=r"RefusedError at (training|network)"):
        server.ask(0, TRAIN, {MEAN: mean})


DEEP = f"{{name: mlp, widths: {[1] * 3000}}}"


@pytest.mark.parametrize("words", [(f"network={DEEP}",), (f"sites=[{{domain: digits, count: 10, network: {DEEP}}}]",)])
def test_a_network_of_thousands_of_layers_is_not_looked_at(words: tuple[str, ...]) -> None:
    config = load("digits", [*WORDS, *words])
    with pytest.raises(RefusedError, match=r"network: its options have 9[0-9]{3} characters, but a site takes at most 4000"):
        Policy.of({}).limits.check(config, config.roster[0])


def test_limits_are_the_sites_own(tmp_path: Path) -> None:
    config = load("digits", [*WORDS, "training.steps=11"])
    for name, limit in {"max_steps": 10, "max_parameters": 0.0001, "min_batch": 33}.items():
        with pytest.raises(RefusedError, match=name):
            Policy.of({name: limit}).limits.check(config, config.roster[0])
    Policy.of({"max_steps": 0, "max_parameters": 0}).limits.check(config, config.roster[0])
    for name, wrong in {"max_steps": -1, "min_members": 1.5, "min_known": True, "min_batch": "x"}.items():
        with pytest.raises(UserError, match=f"{name}: got .*, takes a whole number of at least 0"):
            Policy.of({name: wrong})


def test_the_whole_message_is_weighed(tmp_path: Path) -> None:
    server = Server(tmp_path, WORDS, largest_order=0.05)
    trained(server)
    large = {"x": torch.zeros(100_000)}
    for record in ("other", "before", "secure_lift", "own"):
        with pytest.raises(Refused, match="RefusedError at order;"):
            server.ask(0, TRAIN, {MEAN: server.mean, record: large})
    server.change(*WORDS, f"run.root={'x' * 90_000}")
    with pytest.raises(Refused, match="RefusedError at order;"):
        trained(server)


def test_a_store_keeps_no_more_than_so_many_configurations(tmp_path: Path) -> None:
    server = Server(tmp_path, WORDS)
    for seed in range(40):
        server.change(*WORDS, f"seed={seed}")
        server.reply(0, "enrol")
    files = list((tmp_path / "stores" / name_of(0) / "configurations").glob("*.json"))
    assert 1 < len(files) <= 32
    server.change(*WORDS, "seed=0")
    trained(server)  # one that is gone comes with the order


def test_a_budget_holds_over_runs_and_names(tmp_path: Path) -> None:
    """By place (no name in the node-config) the server names the site."""
    limit = epsilon({2.0: 3}, 1e-5) + 0.01
    server = Server(tmp_path, NOISE, keys=False, epsilon=limit, site="")
    server.policy["partition-id"] = 0
    for number, name in enumerate(("a", "b", "privacy", "c", "memory.sqlite")):
        server.change(*(word for word in NOISE if not word.startswith("sites")), f"sites=[{{domain: digits, name: {name}}}]")
        server.run, server.sites = f"run-{number}", 1
        if number < 3:
            assert trained(server)["epsilon"] == pytest.approx(epsilon({2.0: number + 1}, 1e-5))
        else:
            with pytest.raises(Refused, match=r"budget \(site\.yaml: epsilon\) is spent"):
                trained(server)
    server.reply(0, "erase")
    with pytest.raises(Refused, match=r"budget \(site\.yaml: epsilon\) is spent"):
        trained(server)


def _spend(root: str) -> None:
    for _ in range(40):
        Memory(Path(root)).spend(1.0, lambda times: None)


def test_processes_that_spend_at_once_are_all_counted(tmp_path: Path) -> None:
    started = [multiprocessing.get_context("spawn").Process(target=_spend, args=(str(tmp_path),)) for _ in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert Memory(tmp_path).spend(1.0, lambda times: None) == {1.0: 81}
    assert (tmp_path / "memory.sqlite").stat().st_mode & 0o077 == 0


def test_what_an_earlier_version_spent_counts(tmp_path: Path) -> None:
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "a.json").write_text('{"1.0": 3}')
    (tmp_path / "privacy" / "b.json").write_text('{"1.0": 1, "2.0": 5}')
    assert Memory(tmp_path).spend(2.0, lambda times: None) == {1.0: 4, 2.0: 6}
    assert Memory(tmp_path).spend(2.0, lambda times: None) == {1.0: 4, 2.0: 7}


def test_a_memory_that_cannot_be_read_stops_the_site(tmp_path: Path) -> None:
    (tmp_path / "memory.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match=r"memory\.sqlite: cannot be used"):
        Memory(tmp_path).spend(1.0, lambda times: None)


def test_a_record_never_begins_at_what_only_the_site_knows(tmp_path: Path) -> None:
    """With a tiny clip what leaves in the second round is as far from the first network as the clip, not as training."""
    words = [*NOISE, "privacy.clip=1e-6", "privacy.noise=0.001", "objective={name: sum_aggregation, mode: independent}"]
    server = Server(tmp_path, words, epsilon=0.0)
    sums = {SITE: ONCE, ROUND: ONCE}
    for number in (1, 2, 3):
        content = server.ask(0, TRAIN, {MEAN: server.mean}, sums=sums, slot=SITE, round=number, base=number - 1, rounds=3)
        sent = content.array_records
        for record in (SITE, ROUND):
            moved = [torch.from_numpy(array.numpy().copy()) - server.mean[name] for name, array in sent[record].items()]
            assert torch.cat([one.flatten() for one in moved]).norm() < 3e-6 * number


@pytest.mark.parametrize("words", [(), ("federation.secure_aggregation=true",), ("privacy={clip: 1, noise: 1}",)])
def test_files_with_what_single_sites_gave_are_their_users_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    config = small(tmp_path, "objective.subset_probability=0", "baselines=[]", *words, sites=3)
    run_experiment(InlineGrid(3, store_folder(config), app), config, Recorder())
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".json", ".sqlite") and path.is_file()]
    readable = {path.name for path in files if path.stat().st_mode & 0o077}
    assert readable == {"aggregate.safetensors", "summary.json", "ledger.sqlite", "losses.json"} and len(files) > 8


def test_one_message_is_answered_after_the_other(tmp_path: Path) -> None:
    """Of two orders at once in one attempt, the two answers under the same masks would tell by their difference."""
    context, ends = site_context(0, 1, ""), list[str]()
    context.node_config = {"site": "a", "store": str(tmp_path)}

    def answer(name: str, seconds: float) -> None:
        with alone(context):
            time.sleep(seconds)
            ends.append(name)

    first = threading.Thread(target=answer, args=("first", 1.0))
    first.start()
    while not (tmp_path / "site.lock").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    answer("second", 0.0)
    first.join()
    assert ends == ["first", "second"]


def test_what_fails_in_training_says_nothing_and_is_charged_where_something_is_hidden(tmp_path: Path) -> None:
    """Whether a network of the server's choice diverges tells an image, too."""
    server = Server(tmp_path, (*NOISE, "training.rate=1e30", "training.steps=20"), epsilon=100.0)
    with pytest.raises(Refused, match="HiddenError; the site's own log says more"):
        trained(server)
    server.change(*NOISE)
    assert trained(server)["epsilon"] == pytest.approx(epsilon({2.0: 2}, 1e-5))
    with pytest.raises(Refused, match="the loss is"):
        trained(Server(tmp_path / "plain", (*WORDS, "training.rate=1e30", "training.steps=20")))


def test_a_site_that_hides_is_not_asked_for_the_images_of_one_class(tmp_path: Path) -> None:
    whole = None
    for classes in ("[]", "[3]", "[1, 2]"):
        words = [
            *(word for word in NOISE if not word.startswith("sites")),
            f"sites=[{{domain: digits, classes: {classes}}}]",
        ]
        server = Server(tmp_path / classes, (*words, "data.classes=10"), sites=1, epsilon=9.0, domain="digits")
        found = server.ask(0, "enrol")[METRICS]["samples"]  # type: ignore[index]
        whole = found if whole is None else whole
        assert found == whole


@pytest.mark.parametrize("record", ["own", "before"])
def test_no_one_sends_a_site_what_it_gave_under_masks(tmp_path: Path, record: str) -> None:
    server = Server(tmp_path, MASKS, masks="required")
    masks = Masks(server, range(10)).begin()
    with pytest.raises(Refused, match=r"UserError at order\.secure"):
        server.ask(0, TRAIN, {MEAN: server.mean, record: server.mean}, sums={SITE: ONCE}, slot=SITE, **masks.parts)


@pytest.mark.parametrize("run", ["memory.sqlite", "memory.sqlite-journal", "site.lock", "configurations"])
def test_no_run_has_the_name_of_a_file_of_the_store(tmp_path: Path, run: str) -> None:
    server = Server(tmp_path, WORDS)
    server.run = run
    with pytest.raises(Refused, match=r"UserError at order\.run"):
        trained(server)


def test_noise_counts_as_shared_among_sites_alone_that_are_known(tmp_path: Path) -> None:
    """Of a site with a budget: others could be made up, and add none."""
    words = (*MASKS, "privacy.clip=0.001", "privacy.noise=100", "training.rate=1e-9")
    cases = (("known", True, "", 7.0), ("strange", False, "", 1.0), ("kept", True, SITE, 1.0))
    for name, keys, slot, parts in cases:  # what is kept stays in the sum when the others' noise is drawn anew
        server = Server(tmp_path / name, words, keys=keys, epsilon=50.0, min_known=0)
        total = summed(server, range(10), slot=slot).double() / 2.0**32
        moved = total - 10 * torch.cat([server.mean[key].flatten() for key in sorted(server.mean)]).double()
        assert float(moved.std()) == pytest.approx(0.1 * (10 / parts) ** 0.5, rel=0.15)


def test_noise_that_is_next_to_nothing_answers_at_once(tmp_path: Path) -> None:
    assert not discrete_gaussian(1e-200, 1000).any()
    trained(Server(tmp_path, (*WORDS, "privacy.clip=1", "privacy.noise=1e-200")))
