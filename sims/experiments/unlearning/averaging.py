"""Federated averaging whose server stores every contribution; FedEraser's replay and SIFU's start, without a site."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config
from fedloom.conf.randomness import torch_generator
from fedloom.conf.typed import option
from fedloom.fusion.state import State, moved_back
from fedloom.server.ledger import Ledger
from fedloom.server.strategies import TRAIN, Model, Models, RecordSpec, RoundContext, Slot, Strategy, Sum, View

NETWORKS = "networks"  # the slot


@dataclass(frozen=True)
class Averaging(Strategy):
    """FedAvg (McMahan et al. 2017): the mean of the sites' last networks, weighted by their numbers of images.

    With `start`, it continues from that network.
    """

    start: str = option(
        "", "file of the start network, such as a run's states/aggregate.safetensors; empty: drawn by the seed"
    )

    def slots(self, experiment: Experiment) -> dict[str, Slot]:
        return {NETWORKS: Sum(weighted=True)}

    def begin(self, context: RoundContext) -> None:
        context.save_server_state("start", read_state(Path(self.start)) if self.start else context.initial())

    def no_restoration(self, experiment: Experiment) -> str:
        return ""

    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        if context.restoration:
            mean = moved_back(mean, context.initial(), context.restoration.back)
        context.gather(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean, slot=NETWORKS)})

    def models(self, view: View) -> Models:
        return Models({"mean": lambda: Model(view.architecture(), self.mean(view))})

    def mean(self, view: View) -> State:
        """Return the sites' mean; before the first round, the start."""
        return view.mean(NETWORKS) if view.total(NETWORKS).addends else view.server_state("start")


@dataclass(frozen=True)
class Replay(Averaging):
    """FedEraser (Liu et al. 2021, Eq. 1): the rounds of an earlier run again, without some of its sites.

    Every remaining site trains for a few steps (training.steps) from the current mean. Each tensor moves in the direction of
    that training, as far as the site moved it in the earlier round.
    """

    history: str = option("", "folder of the earlier run, with federation.history=all")

    def round(self, context: RoundContext) -> None:
        mean, before = self.mean(context), self._then(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put(NETWORKS, reply.site, calibrated(mean, reply[SITE], before[reply.site.name]), reply.samples)

    def _then(self, context: RoundContext) -> dict[str, dict[str, float]]:
        """Return by site and tensor the distance moved in this round of the earlier run."""
        with Ledger.open(Path(self.history), server=False) as ledger:
            history = {site: {entry.round: entry for entry in ledger.history(site)} for site in ledger.sites()}
            begun = [each[context.number - 1] for each in history.values() if context.number - 1 in each]
            ended = {site: each[context.number] for site, each in history.items() if context.number in each}
            start = (
                averaged([(ledger.blobs.get(entry.blob), entry.samples) for entry in begun])
                if begun
                else context.server_state("start")
            )
            moved = {site: ledger.blobs.get(entry.blob) for site, entry in ended.items()}
        return {site: {name: float(torch.dist(end, start[name])) for name, end in state.items()} for site, state in
                moved.items()}  # fmt: skip


def sifu_start(config: Config, ledger: Ledger, gone: str, noise: float, bound: float) -> tuple[State, int]:
    """Return the network from which SIFU trains again (Fraboni et al. 2024, Algorithm 1), and its round.

    It is the last mean up to which the site's influence is at most `bound`, with Gaussian noise added. The influence grows
    in each round by the distance between the means with and without the site (their Eq. 7 with B = 1, for losses that are
    not convex).

    Args:
        config: The run's configuration. Its seed draws the noise.
        ledger: The run's ledger, with federation.history=all.
        gone: The site.
        noise: The noise's standard deviation.
        bound: Psi*, the largest influence (`sifu_bound`).
    """
    start, influence, last = initial_state(config), 0.0, 0
    rounds: dict[int, dict[str, tuple[State, int]]] = {}
    for site in ledger.sites():
        for entry in ledger.history(site):
            rounds.setdefault(entry.round, {})[site] = ledger.blobs.get(entry.blob), entry.samples
    for number, sent in sorted(rounds.items()):
        mean, others = averaged(list(sent.values())), averaged([pair for site, pair in sent.items() if site != gone])
        influence += float(torch.stack([(mean[name] - others[name]).square().sum() for name in mean]).sum().sqrt())
        if influence > bound:
            break
        start, last = mean, number
    generator = torch_generator(config.seed, "sifu")
    noisy = {name: tensor + noise * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    return noisy, last


def sifu_bound(noise: float, epsilon: float, delta: float) -> float:
    """Return Psi*, the influence that Gaussian noise hides with (epsilon, delta) (Fraboni et al. 2024, Eq. 9)."""
    return noise * epsilon / math.sqrt(2 * (math.log(1.25) - math.log(delta)))


def averaged(states: Sequence[tuple[State, int]]) -> State:
    """Return the mean of states, weighted by their numbers of images."""
    total = sum(samples for _, samples in states)
    return {
        name: torch.stack([state[name] * (samples / total) for state, samples in states]).sum(0) for name in states[0][0]
    }


def calibrated(start: State, end: State, lengths: dict[str, float]) -> State:
    """Return `start` moved in the direction of `end`, each tensor by its distance in `lengths`."""
    steps = {name: end[name] - start[name] for name in end}
    return {name: start[name] + step * (lengths[name] / max(float(step.norm()), 1e-12)) for name, step in steps.items()}
