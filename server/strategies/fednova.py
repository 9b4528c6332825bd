"""FedNova at the server (Wang et al. 2020): the mean change per unit of work, times the mean work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.fednova import AVERAGE, WORK
from fedloom.clients.objectives.steps import gradient_weight
from fedloom.clients.training.learner import step_count
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import NETWORK, NETWORKS, ROUND, Averaging, check_steps, counted, parameters_of
from fedloom.server.strategies.base import STRATEGIES

ROUNDS = "rounds"  # the length of the run that the sites' schedule follows; sent with the work


@STRATEGIES.register("fednova")
@dataclass(frozen=True)
class FedNova(Averaging):
    """FedNova: x <- x + tau_eff sum p_i (y_i - x) / ||a_i||_1 with tau_eff = sum p_i ||a_i||_1 (Sec. 4.1).

    p_i is a site's share of the images. If all sites take the same steps, it equals FedAvg.

    The server computes the work ||a_i||_1 of a site from the configuration and its number of images. Sites receive tau_eff
    of the sites that are asked, and multiply by it, so they send a change of a network's size. If fewer sites count in the
    end (one did not answer, or was forgotten), the server scales its step by the ratio of the two tau_eff.
    """

    default_objective: ClassVar[str] = "fednova"
    reads_contributions: ClassVar[bool] = True
    unrestorable: ClassVar[str] = "the work of a round follows the run's own schedule"

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        check_steps(experiment)

    def begin(self, context: RoundContext) -> None:
        super().begin(context)
        context.save_server_state(WORK, _work_record(0.0, 0))

    def extra_records(self, context: RoundContext) -> dict[str, State]:
        """Return and save the record of tau_eff, the mean work of the asked sites."""
        samples = [images for site in context.participants if (images := context.images(site))]
        record = _work_record(self._mean_work(context.experiment, context.length, context.number, samples), context.length)
        context.save_server_state(WORK, record)
        return {WORK: record}

    def next_state(self, view: View) -> dict[str, State]:
        """Return the mean of the sites' networks, with the step scaled by `_share`."""
        begin, network, share = view.server_state(NETWORK), super().next_state(view)[NETWORK], self._share(view)
        moved = {name: torch.lerp(begin[name], network[name], share) for name in parameters_of(view.experiment)}
        return {NETWORK: {**network, **moved}}

    def _share(self, view: View) -> float:
        """Return tau_eff of the sites that count, divided by the tau_eff that they received.

        It is 1 if some sites count with a contribution from an earlier round, as under masks: their sum cannot be split.
        """
        if WORK not in view.slots.keeps():
            raise UserError("strategy 'fednova': in this run, sites reported their work themselves; continue it with the "
                            "version that started it")  # fmt: skip
        sent, last = view.server_state(WORK), int(view.server_state(ROUND)["number"])
        names = [site.name for site in counted(view).sites if view.has(NETWORKS, site.name)]
        if not sent[AVERAGE] or any(view.last_put(name) != last for name in names):
            return 1.0
        samples = [view.last_samples(name) for name in names]
        return self._mean_work(view.experiment, int(sent[ROUNDS]), last, samples) / float(sent[AVERAGE]) if samples else 1.0

    def _mean_work(self, experiment: Experiment, rounds: int, round: int, samples: Sequence[int]) -> float:
        """Return tau_eff, times the rate, of sites with these numbers of images. 0 without sites."""
        steps = [step_count(images, experiment) for images in samples]
        works = {number: gradient_weight(experiment.training, rounds, round, number) for number in set(steps)}
        times = samples if self.weighting == "samples" else [1] * len(samples)
        parts = [number * works[each] for number, each in zip(times, steps, strict=True)]
        return math.fsum(parts) / sum(times) if parts else 0.0


def _work_record(work: float, rounds: int) -> State:
    return {AVERAGE: torch.tensor(work, dtype=torch.float64), ROUNDS: torch.tensor(rounds)}
