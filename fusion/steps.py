"""The steps of a fusion: align, balance, combine, then refit, repair or distil."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.fusion.agreement import Agreement, agreement, few_samples
from fedloom.fusion.checks import check_ends, check_layers, check_numbers, check_scale, given_map
from fedloom.fusion.cla_ot.balance import Balanced, balanced, relu_signs, unchanged
from fedloom.fusion.cla_ot.matching import Pins, looked_at, match_seen, pairs_of, undecided, wired
from fedloom.fusion.cla_ot.moves import Moves, carried, moved
from fedloom.fusion.cla_ot.plans import Body, axis_moves, layer_moves
from fedloom.fusion.cla_ot.repair import Statistics, Target, in_basis, mixture, repair, running, watched
from fedloom.fusion.distillation import Distillation, check_images, imitate
from fedloom.fusion.graph.channels import Unit, Wiring, wire
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.graph.undisturbed import undisturbed
from fedloom.fusion.probe import Observation, features_of, observe
from fedloom.fusion.refit.fits import fits
from fedloom.fusion.refit.pooling import chosen_channels, goal_of, selected_state
from fedloom.fusion.refit.refit import refit
from fedloom.fusion.refit.targets import Mixture, Planned, Regressed, Selected, Targets
from fedloom.fusion.results import Fused, Made, View, averaged
from fedloom.fusion.settings import FusionSettings
from fedloom.fusion.state import State


class Fusion:
    """The steps of one fusion, and what they share."""

    def __init__(self, networks: list[nn.Module], into: int, depth: int, probe: Tensor, settings: FusionSettings) -> None:
        self.networks, self.into, self.depth, self.probe, self.settings = networks, into, depth, probe, settings
        self.pins = Pins(settings.pin_first, settings.pin_last)
        self.every = -(-len(probe) // settings.repair_samples) if settings.repair_samples else 1
        self.seconds: dict[str, float] = {}
        self._clock = time.perf_counter()
        if settings.distillation:
            check_images(probe)
        for index, network in enumerate(networks):
            check_numbers(index, network)
        self.wirings = wired(networks, probe)
        for index, wiring in enumerate(self.wirings):
            check_layers(index, wiring)
            check_ends(self.wirings[0], wiring, index)
        self.structure = self.wirings[depth]
        outputs = self.structure.axes[self.structure.layers[-1].outputs].size
        self.classes = settings.answers == "classes" and outputs > 1
        self._lap("wire")

    def run(self, weights: list[float]) -> Fused:
        """Align, balance, combine, and refit or repair the networks."""
        indices = range(len(self.networks))
        seen = [self._observed(wiring, self._compared(index)) for index, wiring in enumerate(self.wirings)]
        self._lap("probe")
        matches = [self._matched(index, seen) for index in indices]
        self._lap("align")
        bodies = [self._balanced(index, matches[index], seen[index]) for index in indices]
        self.bodies = [self._wired(index, bodies[index]) for index in indices]
        views = [self._view(index, bodies[index], seen[index]) for index in indices]
        del seen
        self._lap("balance")
        complete = [Body(body.network, wiring, view.features)
                 for body, wiring, view in zip(bodies, self.bodies, views, strict=True)]  # fmt: skip
        if self.settings.distil_from == "into":
            made = self._alone(complete, weights)
        elif self.settings.refit == "selection":
            made = self._selected(complete, weights)
        else:
            made = self._averaged(bodies, views, weights)
        result = with_state(self.networks[self.depth], made.state, like=complete[self.into].network).eval()
        notes, agreed = self._fitted(result, complete, made, weights)
        if self.settings.distillation:
            imitate(result, self.networks, weights, self.probe, Distillation(self.settings.distillation, rate=5e-4))
            agreed = None
            self._lap("distil")
        if self.classes:
            agreed = agreed or self._agreed(result, weights)
            notes += [*few_samples(self.probe), *(agreed.notes() if agreed else [])]
        notes = [f"network {index}: {note}" for index in indices for note in bodies[index].notes] + notes
        return Fused(
            network=result,
            alignment=tuple(self._alignment(index, match) for index, match in enumerate(matches)),
            pairs=tuple(
                pairs_of(self.structure, wiring, match) for wiring, match in zip(self.wirings, matches, strict=True)
            ),
            plans=made.plans,
            balanced=tuple(body.network for body in bodies),
            aligned=made.aligned,
            costs=made.costs,
            seconds=self.seconds,
            notes=tuple(notes),
            agreement=agreed,
        )

    def _averaged(self, bodies: list[Balanced], views: list[View], weights: list[float]) -> Made:
        """All networks in one basis, and their mean."""
        moves = self._moves(bodies, [view.features for view in views])
        if self.settings.sequential and self.settings.transport.normalisation == "columns":
            check_scale(bodies[self.into].network.state_dict(), self.structure, moves)
        statistics = [(in_basis(view.seen, move.outgoing), in_basis(view.own, move.outgoing))
                      for view, move in zip(views, moves, strict=True)]  # fmt: skip
        self._lap("transport")
        aligned = [body.network if index == self.into else with_state(body.network, self._moved(index, body, moves[index]))
                   for index, body in enumerate(bodies)]  # fmt: skip
        states = [network.state_dict() for network in aligned]
        shares = {name: self._shares(name, states, bodies, weights) for name in states[self.depth]}
        state = averaged(states, shares)
        self._lap("average")
        planned = Planned([{axis: plan.outgoing for axis, plan in (move.plans or {}).items()} for move in moves], weights)
        targets = Regressed(planned, self.into) if self.settings.refit == "regression" else planned
        costs, plans = tuple(move.costs for move in moves), tuple(move.outgoing for move in moves)
        return Made(state, targets, plans, costs, tuple(aligned), statistics, shares)

    def _alone(self, bodies: list[Body], weights: list[float]) -> Made:
        """The network `into` alone, at the depth of the result."""
        state = {name: tensor.clone() for name, tensor in bodies[self.into].network.state_dict().items()}
        return Made(state, Planned([{} for _ in bodies], weights), tuple({} for _ in bodies))

    def _selected(self, bodies: list[Body], weights: list[float]) -> Made:
        """Combine selected channels of all networks."""
        order = [self.into, *(index for index in range(len(bodies)) if index != self.into)]
        first, shares = [bodies[index] for index in order], [weights[index] for index in order]
        choices = chosen_channels(first, shares, self.settings.width, self.probe, self.classes)
        goal = goal_of(self.networks[self.depth], first[0], choices, self.probe)
        state = selected_state(first, choices, shares, goal)
        choices = {axis: replace(choice, follows=choice.keeps) for axis, choice in choices.items()}  # frees memory
        self._lap("select")
        writers = {layer.name: layer.outputs for layer in self.structure.layers if layer.outputs in choices}
        plans = [{name: choices[axis].rows(order.index(index))[0] for name, axis in writers.items()}
                 for index in range(len(bodies))]  # fmt: skip
        return Made(state, Selected(choices, order, weights), tuple(plans))

    def _fitted(
        self, result: nn.Module, bodies: list[Body], made: Made, weights: list[float]
    ) -> tuple[list[str], Agreement | None]:
        """Refit or repair the result in place, as the settings say. Return what `_refitted` returns."""
        if self.settings.distil_from == "into":
            return [], None
        if self.settings.refit != "none":
            return self._refitted(result, bodies, made.mixture, weights)
        return (self._repaired(result, made.statistics, made.shares) if self.settings.repair else []), None

    def _refitted(
        self, result: nn.Module, bodies: list[Body], mixture: Mixture, weights: list[float]
    ) -> tuple[list[str], Agreement | None]:
        """Refit the result in place. Return notes, and how often the result gives the joint answer of all networks."""
        wiring = wire(result, self.probe[:1])
        targets = Targets(bodies, mixture, weights, wiring)
        done = refit(result, wiring, targets, self.probe, self.settings.positions, self.classes)
        agreed = agreement(done.answers[:-1], done.answers[-1], weights) if done.answers else None
        self._lap("refit")
        return [*mixture.notes(self.into), *done.notes()] if done.layers else [], agreed

    def _agreed(self, result: nn.Module, weights: list[float]) -> Agreement | None:
        """Return how often the result gives the joint answer; None if the outputs are not logits [k, classes]."""
        answers = []
        with torch.no_grad():
            for network in (*(wiring.graph for wiring in self.wirings), result):
                with undisturbed(network), evaluating(network):
                    answers.append(network(self.probe))
        fused = answers.pop()
        if not all(isinstance(each, Tensor) and each.ndim == 2 and each.shape == fused.shape for each in answers):
            return None
        return agreement(answers, fused, weights)

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._clock = now - self._clock, now

    def _compared(self, index: int) -> list[Unit]:
        """Return the network's units whose matches need a comparison."""
        if self.settings.map is not None:
            return []
        others = [other for other in range(len(self.networks)) if other != self.depth]
        pairs = {other: undecided(self.structure, self.wirings[other], self.pins) for other in others}
        return [unit for pair in pairs.values() for unit in pair[0]] if index == self.depth else pairs[index][1]

    def _observed(self, wiring: Wiring, compared: Sequence[Unit] = ()) -> Observation:
        settings, looked = self.settings, looked_at(compared, self.settings.comparison)
        points = {node for nodes in wiring.points.values() for node in nodes}
        points = points if settings.basis == "activations" or settings.refit != "none" else set()
        points |= {fit.end for fit in fits(wiring).values()} if settings.refit != "none" else set()
        if settings.sequential:
            points |= {layer.node for layer in wiring.layers if layer.kind != "norm"}
        nodes = watched(wiring) if settings.repair and settings.refit == "none" else {}
        features = points | looked.get("features", set()) | {unit.node for unit in wiring.units if unit.kind == "layer"}
        return observe(wiring, self.probe, features=features, grams=looked.get("grams", ()),
                       moments=set(nodes.values()), positions=settings.positions, every=self.every)  # fmt: skip

    def _matched(self, index: int, seen: list[Observation]) -> dict[int, int]:
        wiring, settings = self.wirings[index], self.settings
        if index == self.depth:
            return {unit: unit for unit in range(len(wiring.units))}
        if settings.map is not None:
            return given_map(settings.map, len(self.structure.units), len(wiring.units), len(self.networks))
        return match_seen(self.structure, wiring, seen[self.depth], seen[index], settings.comparison, self.pins)

    def _balanced(self, index: int, matches: dict[int, int], seen: Observation) -> Balanced:
        network, wiring = self.networks[index], self.wirings[index]
        if index == self.depth:
            return unchanged(network, wiring)
        merged = {unit.node for k, unit in enumerate(wiring.units) if k not in matches.values()} & seen.features.keys()
        signs = relu_signs({node: features_of(seen, node) for node in merged}, self.settings.relu)
        inner = "stream" if self.settings.sequential else "own"
        return balanced(self.networks[self.depth], self.structure, network, wiring, matches, signs, inner)

    def _view(self, index: int, body: Balanced, seen: Observation) -> View:
        """Return what the balanced network does: observed before balancing where possible, else in the network itself."""
        known, modules = _by_layer(seen, self.wirings[index]), dict(self.networks[index].named_modules())
        origins = {name: origin for name, origin in body.origins.items() if origin in known}
        before = {name: known[origin] for name, origin in origins.items()}
        own = {name: stored for name, origin in origins.items() if (stored := running(modules[origin]))}
        if self.settings.sequential or body.stale:
            wiring = wire(body.network, self.probe[:1])
            new = self._observed(wiring)
            features = {node: features_of(new, node) for node in new.features}
            return View(features, before if own else _by_layer(new, wiring), own)
        sources = {node: source for node, source in body.sources.items() if source.node in seen.features}
        before_relu = {node: features_of(seen, source.node) for node, source in sources.items()}
        features = {node: values.relu() if sources[node].rectified else values for node, values in before_relu.items()}
        return View(features, before, own)

    def _moves(self, bodies: list[Balanced], views: list[Mapping[str, Tensor]]) -> list[Moves]:
        """Return the moves of each network into the basis of `into`.

        The network that gives the depth comes first: where `into` lacks a layer, the others move into its basis.
        """
        settings, make = self.settings, layer_moves if self.settings.sequential else axis_moves
        goal, values, wirings = bodies[self.into].network, views[self.into], self.bodies
        moves = {self.into: Moves({}, {}, {})}
        for index in sorted(range(len(bodies)), key=lambda index: index != self.depth):
            if index == self.into:
                continue
            body, into = Body(bodies[index].network, wirings[index], views[index]), Body(goal, wirings[self.into], values)
            moves[index] = make(self.structure, body, into, settings.transport, settings.basis)
            if index == self.depth and len(bodies) > 2 and bodies[self.into].added and not settings.sequential:
                state = self._moved(index, bodies[index], moves[index])
                goal = with_state(goal, {name: state[name] for name in bodies[self.into].added})
                values = {**views[index], **values}
        return [moves[index] for index in range(len(bodies))]

    def _wired(self, index: int, body: Balanced) -> Wiring:
        return self.wirings[index] if body.network is self.networks[index] else wire(body.complete, self.probe[:1])

    def _moved(self, index: int, body: Balanced, move: Moves) -> State:
        if move.plans is None:
            return moved(body.network.state_dict(), self.structure.layers, move)
        return dict(carried(body.network.state_dict(), self.bodies[index], self.bodies[self.into], move.plans))

    def _shares(self, name: str, states: list[State], bodies: list[Balanced], weights: list[float]) -> list[float]:
        """Return each network's share in the mean of a tensor; 0 for networks without such a layer."""
        have = [name in state for state in states]
        own = [present and name not in body.added for present, body in zip(have, bodies, strict=True)]
        taken = own if self.settings.keep_added and any(own) else have
        portions = [weight if present else 0.0 for weight, present in zip(weights, taken, strict=True)]
        return (
            [share / sum(portions) for share in portions] if any(portions) else [present / sum(taken) for present in taken]
        )

    def _repaired(
        self,
        result: nn.Module,
        statistics: Sequence[tuple[Mapping[str, Statistics], Mapping[str, Statistics]]],
        shares: Mapping[str, list[float]],
    ) -> list[str]:
        """Repair the result's channel statistics in place and return notes."""
        by_layer = {name.rpartition(".")[0]: share for name, share in shares.items()}
        seen, own = (mixture(parents, by_layer) for parents in zip(*statistics, strict=True))
        without = repair(result, Target(seen, own), self.probe[:: self.every])
        self._lap("repair")
        return [f"{len(without)} layers without bias got one by repair, {without[0]} the first"] if without else []

    def _alignment(self, index: int, matches: Mapping[int, int]) -> tuple[int, ...]:
        pairs = sorted(matches.items())
        deeper = len(self.wirings[index].units) > len(self.structure.units)
        return tuple(theirs if deeper else ours for ours, theirs in pairs)


def _by_layer(seen: Observation, wiring: Wiring) -> dict[str, Statistics]:
    moments = {name: seen.moments[node] for name, node in watched(wiring).items() if node in seen.moments}
    return {name: (value.mean, value.std) for name, value in moments.items()}
