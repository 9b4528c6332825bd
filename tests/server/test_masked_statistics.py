"""data.standardise=sites under secure aggregation: only sums over several sites are read, with the bits of single sums."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message

from fedloom.clients.app import app
from fedloom.clients.data.standardise import STANDARDISATION, STATISTICS
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import MASKED, SECURE_TRAINED, TRAIN, TaskInstructions, read_order, to_states
from fedloom.conf import Config
from fedloom.conf.errors import FailedError
from fedloom.conf.loading import load_text
from fedloom.fusion.state import State
from fedloom.server.ledger.audit import check
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.masked import Spoiled, changed, forget, gone, run
from tests.server.parts import Recorder, folder
from tests.server.runs import method_of

SITES = 5
NAMES = [f"site-{place:04d}" for place in range(SITES)]
MASKS = "federation.secure_aggregation=true"
VARIED = ("training.batch=1", "training.rate=0.5", "training.epochs=3")  # a site's rounds train clearly differently


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = np.random.default_rng(3).normal([1, 5e4, -3e-4], [1, 2e3, 1e-5], size=(240, 3))
    lines = (f"{a},{b},{c},{row * 7 % 11 % 2}\n" for row, (a, b, c) in enumerate(rows))
    path = tmp_path_factory.mktemp("tables") / "rows.csv"
    path.write_text("a,b,c,target\n" + "".join(lines), encoding="utf-8")
    return path


def configured(root: Path, table: Path, *words: str, name: str = "rows") -> Config:
    text = f"""
sites: [{{domain: "table:{table}", count: {SITES}}}]
network: {{name: mlp, widths: [8]}}
objective: fedavg
strategy: {{name: fedavg, weighting: equal}}
rounds: 2
engine: inline
"""
    return load_text(text, "rows", [f"run.root={root}", f"run.name={name}", *words])


def statistics(method: TrainingRun) -> State:
    by = method.state.features.current()
    assert by is not None
    return by.state()


def same(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def over(root: Path, table: Path, names: Sequence[str], *words: str) -> State:
    """The mean and deviation of a run in which these sites are asked without masks."""
    with method_of(configured(root, table, *words, name="-".join(names))) as method:
        grid = InlineGrid(SITES, store_folder(method.config), Spoiled())
        method.train(method.joined(grid), Recorder(), 1)
        method.state.membership.forget([name for name in NAMES if name not in names], {})
        return statistics(method)


def test_masks_change_no_bit_of_statistics_and_hide_single_sums(table: Path, tmp_path: Path):
    client, masked = Spoiled(), configured(tmp_path, table, MASKS)
    listener = run(masked, client)
    assert all(record["replies"] == SITES and not record["dropped"] for record in listener.records)
    plain = configured(tmp_path, table, name="plain")
    run(plain)
    with method_of(plain) as one, method_of(masked) as two:
        assert same(statistics(one), statistics(two)) and one.state.digest()["networks"] == two.state.digest()["networks"]
    files = [(folder(config) / f"{STANDARDISATION}.safetensors").read_bytes() for config in (plain, masked)]
    assert files[0] == files[1] and check(folder(masked)) == []
    answers = [to_states(reply.content) for kind, _, reply in client.replies if kind == STATISTICS]
    assert len(answers) == SITES
    for states in answers:
        assert states.keys() == {STATISTICS, SECURE_TRAINED}
        assert states[STATISTICS][MASKED].double().abs().mean() > 2.0**60


def test_forgetting_asks_the_others_again(table: Path, tmp_path: Path):
    config, client = configured(tmp_path, table, MASKS), Spoiled()
    run(config)
    with method_of(config) as method:
        before = statistics(method)
        with pytest.raises(FailedError, match=r"site-0002 did not answer, .* needs a sum over the rest of its cohort"):
            forget(method, config, [NAMES[1]], "first", Spoiled(gone, [STATISTICS], [2]))
        assert same(statistics(method), before)
        forget(method, config, [NAMES[1]], "first", client)
        assert {site for kind, site, _ in client.replies if kind == STATISTICS} == {0, 2, 3, 4}
        assert same(statistics(method), over(tmp_path, table, [NAMES[0], *NAMES[2:]]))
        assert any("standardised" in trace.reason for trace in method.state.residue([NAMES[1]]))
        forget(method, config, [NAMES[0]], "second")
        assert same(statistics(method), over(tmp_path, table, NAMES[2:]))
        assert [one.state for one in map(method.ledger.request, ("first", "second")) if one] == ["verified"] * 2
    assert check(folder(config)) == []


def test_a_site_that_never_trained_leaves_the_statistics(table: Path, tmp_path: Path):
    config = configured(tmp_path, table, MASKS, "rounds=1")
    run(config, Spoiled(gone, [TRAIN], [4]))
    with method_of(config) as method:
        assert same(statistics(method), over(tmp_path, table, NAMES))
        assert not method.state.slots.has("networks", NAMES[4])
        receive(method.ledger, "back", [NAMES[4]], "", {"rollback": True})
        method.unlearning().take((listener := Recorder()).message)
        assert "site-0004 has no contribution; leave --rollback out" in listener.messages[0]
        with pytest.raises(
            FailedError, match=r"site-0002 did not answer, but data\.standardise=sites needs a sum over the rest"
        ):
            forget(method, config, [NAMES[4]], "first", Spoiled(gone, [STATISTICS], [2]))
        forget(method, config, [NAMES[4]], "first")
        assert same(statistics(method), over(tmp_path, table, NAMES[:4]))


def test_a_single_new_site_uses_the_statistics_of_the_others(table: Path, tmp_path: Path):
    config = configured(tmp_path, table, MASKS, *VARIED)
    with method_of(config) as method:
        grid = InlineGrid(SITES, store_folder(config), Absent())
        method.train(method.joined(grid), first := Recorder(), 1)
        assert first.records[0]["replies"] == 4
        sums = statistics(method)
        method.train(method.joined(grid), second := Recorder(), 2)
        assert second.records[0]["replies"] == SITES
        assert same(statistics(method), sums) and same(sums, over(tmp_path, table, NAMES[:4]))
        assert method.state.slots.has("networks", NAMES[4]) and not method.state.features.has_summed([NAMES[4]])


class Absent(Spoiled):
    """The real ClientApp, whose last site does not answer in the first round."""

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":
            return app(message, context)
        order = read_order(message.content)
        reply = super().__call__(message, context)
        return gone(message, reply) if (order.round, order.site) == (1, 4) else reply


def test_new_sites_are_summed_together(table: Path, tmp_path: Path):
    config = configured(tmp_path, table, MASKS, "federation.fraction=0.6", "seed=4", *VARIED)
    client = Spoiled()
    run(config, client)
    asked = [site for kind, site, _ in client.replies if kind == STATISTICS]
    assert len(asked) == SITES and sorted(asked[:3]) != [0, 1, 2] and set(asked) == set(range(SITES))
    with method_of(config) as method:
        assert same(statistics(method), over(tmp_path, table, NAMES, "seed=4"))


def test_only_the_rest_of_a_cohort_answers_again(table: Path, tmp_path: Path):
    words = ["federation.fraction=0.5", "rounds=6", "sites.0.count=6", "training.batch=1"]
    config, plain = configured(tmp_path, table, MASKS, *words), configured(tmp_path, table, *words, name="plain")
    client = Spoiled()
    run(config, client)
    run(plain)
    asked = [f"site-{site:04d}" for kind, site, _ in client.replies if kind == STATISTICS]
    first, second = asked[:3], asked[3:]
    assert len(second) == 2  # a single sixth site uses the others' statistics
    with method_of(config) as method, method_of(plain) as other:
        other.state.membership.forget([name for site in config.roster if (name := site.name) not in asked], {})
        for name, again in ((first[0], first[1:]), (second[0], [])):
            client = Spoiled()
            forget(method, config, [name], name, client)
            other.state.membership.forget([name] if again else second, {})  # a sum over one site would be its own
            assert {f"site-{site:04d}" for kind, site, _ in client.replies if kind == STATISTICS} == set(again)
            assert same(statistics(method), statistics(other))
        receive(method.ledger, "last", [first[1]], "", {})
        method.unlearning().take(Recorder().message)
        request = method.ledger.request("last")
        assert request and request.state == "refused"
    assert check(folder(config)) == []


def test_a_resumed_run_asks_no_site_again(table: Path, tmp_path: Path):
    whole, halved = (configured(tmp_path, table, MASKS, "rounds=3", name=name) for name in "ab")
    run(whole)
    client = Spoiled()
    for rounds in (1, 3):
        with method_of(halved) as method:
            method.train(method.joined(InlineGrid(SITES, store_folder(halved), client)), Recorder(), rounds)
    assert len([kind for kind, _, _ in client.replies if kind == STATISTICS]) == SITES
    with method_of(whole) as one, method_of(halved) as two:
        assert same(statistics(one), statistics(two)) and one.state.digest() == two.state.digest()


def test_a_sum_that_no_examples_have_ends_the_round(table: Path, tmp_path: Path):
    config = configured(tmp_path, table, MASKS)

    def beyond(state: State) -> State:
        return {MASKED: state[MASKED] + 2**62}

    with pytest.raises(FailedError, match=rf"record '{STATISTICS}': .* The masks hide which site is at fault"):
        run(config, Spoiled(changed(STATISTICS, beyond), [STATISTICS]))


def test_a_real_site_answers_the_question_under_masks_only(table: Path, tmp_path: Path):
    config = configured(tmp_path, table, MASKS)
    order = TaskInstructions("0" * 64, "run", 0, 1, 1, 0, SITES, kind=STATISTICS)
    hidden = TaskInstructions("0" * 64, "run", 0, 1, 1, 0, SITES, kind=STATISTICS, secure="1")
    for check_order in (
        lambda each: Policy().check_question(each, config),
        Policy(masks="required").check_secure_aggregation,
    ):
        check_order(hidden)
        with pytest.raises(RefusedError, match="asks for more than sums"):
            check_order(order)
    with pytest.raises(RefusedError, match="asks for what is not noised"):
        Policy(epsilon=1.0).check_privacy_budget(hidden, config)


def test_real_sites_refuse_sums_that_differ_by_one_site(table: Path, tmp_path: Path):
    words = [MASKS, "data.form={kind: features, shape: [3]}", "data.classes=2", "training.steps=3", "training.batch=8",
             "federation.most_samples=1000"]  # fmt: skip
    policy = {"masks": "required", "min_known": 0, "domain": f"table:{table}"}
    sites = Real(tmp_path / "stores", policy)
    digests = set()
    for name, more in {"one": [], "two": ["training.rate=0.2"]}.items():
        run(configured(tmp_path, table, *words, *more, name=name), sites)
        digests.add((tmp_path / name / f"{STANDARDISATION}.safetensors").read_bytes())
    assert len(digests) == 1
    fewer = configured(tmp_path, table, *words, "training.rate=0.3", "sites.0.count=4", name="fewer")
    with pytest.raises(
        FailedError,
        match=r"nearly the same as in an earlier sum of other sites, or of another run.* with data\.standardise=none",
    ):
        run(fewer, sites)


class Real(Spoiled):
    """The real ClientApp at sites that are not simulated: each has a policy and its own store."""

    def __init__(self, root: Path, policy: dict[str, str | int]) -> None:
        super().__init__()
        self.root, self.policy = root, policy

    def __call__(self, message: Message, context: Context) -> Message:
        place = context.node_config["partition-id"]
        context.node_config = {"site": NAMES[int(place)], "store": str(self.root / NAMES[int(place)]), **self.policy}
        return super().__call__(message, context)
