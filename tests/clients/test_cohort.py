"""Sites trained as one: what they answer and keep is what the real ClientApp makes of them one after the other."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedloom.clients.app import app
from fedloom.clients.job import Job, read_job
from fedloom.clients.objectives import Session
from fedloom.clients.protocol.messages import METRICS, SUBSET, TRAIN, read_order, to_states
from fedloom.clients.storage.states import read_state, write_state
from fedloom.clients.training import vectorised
from fedloom.clients.training.learner import DivergedError, clip_all
from fedloom.clients.training.vectorised import clip_each, same_shape, train_cohort
from fedloom.conf import UserError, load
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import site_context
from fedloom.sims.engines.inline import InlineGrid

ENTRIES = ["{domain: digits, samples: 60, flip: true}", "{domain: digits, samples: 60, rotation: 90, count: 2}"]
OF = "of: {name: convnet, widths: [4], norm: group, groups: 2}, at: block1"
PARTED = [f"network={{name: split, {OF}, head: {{name: mlp, widths: [6]}}}}"]
APART = ["data.heads=own", "sites.0={domain: digits, samples: 60, classes: [1, 2, 3], relabel: true}",
         "sites.1={domain: digits, samples: 60, count: 2, classes: [2, 3, 4], relabel: true, label: b}"]  # fmt: skip
SUBSETS = "objective.subset_probability=0.5"
PLAIN = ["network.affine=true", "network.standardise=false", "training.epochs=2", "objective.own_weight=0.5"]
CLIPPED = ["training.clip=0.5", "training.weight_decay=0.01", "objective.norm=frobenius", "objective.initialisation=own"]


class Recorder(ClientApp):
    """The real ClientApp; it keeps what it is sent and what it answers, by round and site."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, dict[int, Message]] = {}
        self.answers: dict[int, dict[int, Message]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == TRAIN:
            order = read_order(message.content)
            self.sent.setdefault(order.round, {})[order.site] = message
            self.answers.setdefault(order.round, {})[order.site] = reply
        return reply


class Run:
    """Two rounds of a federation in this process, and the same jobs once more, with stores that are empty at first."""

    def __init__(self, folder: Path, *overrides: str, entries: list[str] = ENTRIES, sites: int = 3) -> None:
        small = [f"sites=[{', '.join(entries)}]", "data.size=8", "network.width=0.25", "rounds=2", "baselines=[]"]
        quick = ["data.validation_limit=20", "data.test_limit=20", "evaluation.every=2", "evaluation.sites=0"]
        config = load("digits", [*small, *quick, "engine.name=inline", f"run.root={folder}", "run.name=run", *overrides])
        self.recorder, self.sites = Recorder(), sites
        self.stores = {"alone": folder / "alone", "cohort": folder / "cohort"}
        run_experiment(InlineGrid(sites, self.stores["alone"], self.recorder), config, LogListener())

    def jobs(self, round: int) -> list[Job]:
        store = str(self.stores["cohort"])
        sent = self.recorder.sent[round]
        return [read_job(sent[site], site_context(site, self.sites, store)) for site in range(self.sites)]

    def alone(self, round: int, site: int) -> RecordDict:
        """What the ClientApp answered."""
        return self.recorder.answers[round][site].content

    def kept(self, store: str, round: int) -> dict[str, Path]:
        """The files of a round, by the path in the store."""
        root = self.stores[store]
        return {str(file.relative_to(root)): file for file in root.rglob(f"round-{round:06d}.safetensors")}


def assert_near(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-5)


def assert_same_reply(reply: RecordDict | Exception, alone: RecordDict) -> None:
    assert isinstance(reply, RecordDict), reply
    assert list(reply) == list(alone)
    assert reply.metric_records[METRICS]["samples"] == alone.metric_records[METRICS]["samples"]
    assert reply.metric_records[METRICS]["loss"] == pytest.approx(alone.metric_records[METRICS]["loss"], abs=1e-5)
    states, expected = to_states(reply), to_states(alone)
    for name, state in expected.items():
        assert_near(states[name], state)


@pytest.mark.parametrize("options", [[SUBSETS], [*PLAIN, *CLIPPED]], ids=["subsets", "clipped"])
@pytest.mark.parametrize("mode", ["exact", "independent", "fedavg", "regularised"])
def test_a_cohort_answers_and_keeps_what_its_sites_do_one_by_one(mode: str, options: list[str], tmp_path: Path):
    run = Run(tmp_path, f"objective.mode={mode}", *options)
    for round in (1, 2):
        jobs = run.jobs(round)
        assert same_shape(jobs, most=3) == [[0, 1, 2]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of what it cannot vmap
            replies = train_cohort(jobs)
        for site, reply in enumerate(replies):
            assert_same_reply(reply, run.alone(round, site))
    if options[0] == SUBSETS and mode == "exact":
        assert sum(name.startswith(SUBSET) for name in jobs[0].content) == 3
    for round in (1, 2):
        kept, expected = run.kept("cohort", round), run.kept("alone", round)
        assert kept.keys() == expected.keys()
        assert len(kept) == (0 if mode == "fedavg" else 3)
        for name, file in expected.items():
            assert_near(read_state(kept[name]), read_state(file))


@pytest.mark.parametrize(("name", "options"), [
    ("heterofl", []),
    ("depthfl", ["network={name: exits, of: {name: mlp, widths: [8, 6]}}"]),
    ("fedproto", ["network={name: mlp, widths: [8]}"]),
    ("head_transfer", [*PARTED, "objective={name: components, mode: fedper}"]),
    ("head_transfer", [*PARTED, "objective={name: components, mode: fedrep}"]),
    ("head_transfer", [*PARTED, "objective={name: components, mode: fedbabu}"]),
    ("head_transfer", [*PARTED, "objective={name: components, auxiliary: [dcc, rp]}"]),
    ("head_transfer", [*PARTED, *APART, "objective={name: components, auxiliary: [dcc]}"]),
])  # fmt: skip
def test_a_cohort_does_so_by_the_losses_of_methods_for_different_networks(name: str, options: list[str], tmp_path: Path):
    run = Run(tmp_path, f"strategy={{name: {name}}}", f"objective={{name: {name}}}", *options)
    for round in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replies = train_cohort(run.jobs(round))
        for site, reply in enumerate(replies):
            assert_same_reply(reply, run.alone(round, site))


SMOOTH = ["training.optimizer={name: adamw, eps: 1e-2}", "training.label_smoothing=0.1", "training.schedule.warm_up=0.5"]


@pytest.mark.parametrize(("options", "apart"), [(SMOOTH, 1e-5), (["training.precision=bf16"], 2e-2)], ids=["adamw", "bf16"])
def test_a_cohort_trains_as_the_section_training_says(options: list[str], apart: float, tmp_path: Path):
    run = Run(tmp_path, *options, "training.augment=[{name: RandomCrop, size: 8, padding: 1}]")
    replies = train_cohort(run.jobs(1))
    for site, reply in enumerate(replies):
        assert isinstance(reply, RecordDict), reply
        for name, state in to_states(run.alone(1, site)).items():
            for key, tensor in state.items():
                assert tensor.dtype == torch.float32
                torch.testing.assert_close(to_states(reply)[name][key], tensor, rtol=apart, atol=apart)


def test_a_site_that_diverges_and_one_that_lost_its_state_fail_alone(tmp_path: Path):
    run = Run(tmp_path, "objective.mode=independent", "training.clip=0.5", entries=[*ENTRIES, ENTRIES[0]], sites=4)
    train_cohort(run.jobs(1))
    jobs = run.jobs(2)
    state = jobs[0].store.load(1)
    write_state(jobs[0].store.folder / "round-000001.safetensors", {**state, "head.weight": state["head.weight"] * 3e38})
    (jobs[3].store.folder / "round-000001.safetensors").unlink()
    first, second, third, fourth = train_cohort(jobs)
    assert isinstance(first, DivergedError)
    assert "site-0000: the first loss of round 2 is inf" in str(first)
    assert jobs[0].store.rounds() == [1]  # nothing of the failed round is kept
    assert_same_reply(second, run.alone(2, 1))
    assert_same_reply(third, run.alone(2, 2))
    assert isinstance(fourth, UserError)
    assert "is lost" in str(fourth)


def test_only_sites_with_equally_many_images_are_joined(tmp_path: Path):
    entries = ["{domain: digits, samples: 60}", "{domain: digits, samples: 40}", "{domain: digits, samples: 60, count: 3}"]
    run = Run(tmp_path, entries=entries, sites=5)
    jobs = run.jobs(1)
    assert same_shape(jobs, most=8) == [[0, 2, 3, 4], [1]]
    assert same_shape(jobs, most=3) == [[0, 2, 3], [4], [1]]
    assert same_shape([jobs[0], run.jobs(2)[2]], most=8) == [[0], [1]]
    [reply] = train_cohort([jobs[1]])
    assert isinstance(reply, RecordDict)  # one site takes the one-by-one path: the very same bits
    for name, state in to_states(run.alone(1, 1)).items():
        assert all(torch.equal(to_states(reply)[name][key], tensor) for key, tensor in state.items())


class Opaque(Session):
    """A session whose loss is no pure function."""

    def __init__(self, inner: Session) -> None:
        self.inner = inner

    def parameters(self):
        return self.inner.parameters()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.inner.loss(images, labels)

    def contribution(self):
        return self.inner.contribution()

    def local_state(self):
        return self.inner.local_state()


def test_a_session_that_cannot_be_stacked_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path)
    made = vectorised.session_of
    monkeypatch.setattr(vectorised, "session_of", lambda job, place: Opaque(made(job, place)))
    for site, reply in enumerate(train_cohort(run.jobs(1))):
        assert_same_reply(reply, run.alone(1, site))


def test_clipping_is_that_of_each_network_on_its_own():
    generator = torch.Generator().manual_seed(0)
    shapes, scales = [(3, 2, 4), (3, 5), (3, 1)], torch.tensor([0.01, 1.0, torch.nan])
    stacked = [torch.randn(shape, generator=generator) * scales.view(-1, *[1] * (len(shape) - 1)) for shape in shapes]
    expected: list[list[Tensor]] = []
    for k in range(3):
        network = [nn.Parameter(torch.zeros(shape[1:])) for shape in shapes]
        for parameter, gradient in zip(network, stacked, strict=True):
            parameter.grad = gradient[k].clone()
        nn.utils.clip_grad_norm_(network, 0.7)
        expected.append([parameter.grad for parameter in network if parameter.grad is not None])
        alone = clip_all([gradient[k] for gradient in stacked], 0.7)
        torch.testing.assert_close(alone, expected[k], equal_nan=True, rtol=0, atol=0)
    together = [torch.stack(gradients) for gradients in zip(*expected, strict=True)]
    torch.testing.assert_close(clip_each(stacked, 0.7), together, equal_nan=True)


def test_a_loss_with_weights_of_each_site_is_never_stacked(tmp_path: Path):
    plain = Run(tmp_path / "plain")
    balanced = Run(tmp_path / "balanced", "training.loss={name: cross_entropy, class_weights: balanced}")
    assert [len(same_shape(run.jobs(1), 3)) for run in (plain, balanced)] == [1, 3]
    first, second = (run.alone(1, 0).metric_records[METRICS]["loss"] for run in (plain, balanced))
    assert first != second
