"""LASEM and fixed configurations on a sequence of tasks, with the same sessions as the sites of a federation."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.objectives import resolve
from fedloom.clients.objectives.base import Task
from fedloom.clients.objectives.layer_selection.configurations import shown
from fedloom.clients.objectives.layer_selection.objective import LayerSelection
from fedloom.clients.objectives.layer_selection.session import SHARED_PARTS, SelectionSession, below, composed
from fedloom.clients.protocol.messages import MEAN
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.typed import build
from fedloom.fusion.state import State
from fedloom.sims.experiments.lasem.lifelong import Learner, Training


def configured(network: Mapping[str, Any], size: int, classes: int, tasks: int, seed: int) -> Config:
    """Return the configuration of a federation with a site for each task. Its images are not used."""
    sites = f"[{{domain: digits, count: {tasks}}}]"
    return load("digits", [f"sites={sites}", f"seed={seed}", f"data={{size: {size}, grey: false, classes: {classes}}}",
                           f"network={json.dumps(dict(network))}"])  # fmt: skip


class Selecting(Learner):
    """LASEM, or a fixed configuration. Shared layers continue from the task before; those not selected do not change."""

    def __init__(self, options: Mapping[str, Any], config: Config) -> None:
        super().__init__()
        self.objective, self.config, self.sites = build(LayerSelection, options, "objective"), config, config.roster
        self.layers = self.objective.layers_of(config, self.sites[0])
        self.shared = self.layers.shared(config, self.sites[0])
        self.session: SelectionSession
        self.stores: dict[int, State] = {}
        self.seen: dict[int, Tensor] = {}

    def start(self, task: int, validation: Examples) -> Training:
        session = self.session = SelectionSession(self.objective, self.task(task, None, self.shared))
        return Training(session.parameters, session.loss, lambda: self.put_together(task, _state(session), {})[0])

    def finish(self, task: int, training: Training) -> None:
        self.stores[task] = _state(self.session)
        self.seen[task] = torch.stack(self.session.masses).float()
        used, ends = self.session.belief.best(), below(self.stores[task], SHARED_PARTS)
        self.shared = {
            name: ends[name] if used[self.layers.group_of(name)] else before for name, before in self.shared.items()
        }

    def network(self, task: int) -> nn.Module:
        return self.put_together(task, self.stores[task], self.shared)[0]

    def facts(self, task: int) -> dict[str, Any]:
        """Return the chosen configuration, and each group's probability of sharing in every tenth of the training."""
        parts = [part.mean(0).tolist() for part in self.seen[task].tensor_split(10) if len(part)]
        return {"configuration": shown(self.put_together(task, self.stores[task], {})[1]), "shared": parts}

    def task(self, number: int, stored: State | None, shared: State) -> Task:
        """Return the session input of site `number`, with its stored state and the shared parameters."""
        site, seed = self.sites[number], self.config.seed
        network = architecture_of(self.config, site).build().train()
        draw = torch_generator(seed, "selection", site.name)
        return Task(
            resolve(self.config), site, 1, len(self.sites), network, {MEAN: shared} if shared else {}, lambda: stored, draw
        )

    def put_together(self, number: int, stored: State, shared: State) -> tuple[Network, tuple[int, ...]]:
        """Return a task's network and configuration, with these shared parameters (empty: those at the task's end)."""
        task = self.task(number, stored, shared)
        composition = composed(self.objective, task, shared)
        assert composition is not None  # it is stored
        task.network.load_state_dict(composition[0])
        return task.network, composition[1]


def _state(session: SelectionSession) -> State:
    state = session.local_state()
    assert state is not None  # it always has its own state
    return state
