"""Federated averaging whose server stores every site's contribution, and FedEraser's replay without a site."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.clients.storage.states import read_state
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger import Ledger
from fedloom.server.strategies import TRAIN, Model, Models, RecordSpec, RoundContext, Slot, Strategy, Sum, View

NETWORKS = "networks"  # the slot


@dataclass(frozen=True)
class Averaging(Strategy):
    """FedAvg (McMahan et al. 2017): the mean of the sites' last networks, weighted by their numbers of images.

    With `start`, it continues from that network, or from part of the way to it. After a subtraction, an aggregate may know
    less of the site's domain than if the site had never participated. Nearer to the common start, this trace is weaker.
    """

    start: str = option(
        "", "file of the start network, such as a run's states/aggregate.safetensors; empty: drawn by the seed"
    )
    share: float = option(1.0, "share of the way from the drawn network to `start`", low=0.0, high=1.0)

    def slots(self, experiment: Experiment) -> dict[str, Slot]:
        return {NETWORKS: Sum(weighted=True)}

    def begin(self, context: RoundContext) -> None:
        drawn = context.initial()
        end = read_state(Path(self.start)) if self.start else drawn
        context.save_server_state("start", {name: torch.lerp(drawn[name], end[name], self.share) for name in drawn})

    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
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
