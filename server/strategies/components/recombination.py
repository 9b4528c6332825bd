"""Heads of all sites on the extractors of all sites: what is published, and how good each pair was measured to be.

Recombination accuracy (Gygli et al. 2021, Sec. 4): the share of right answers of site j's head on site i's extractor, on
i's test images of the classes that j's head knows, without any training. It is measured at site i, which sends numbers.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data import class_things, label
from fedloom.clients.networks import Architecture, Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.components.objective import (
    KINDS,
    LABELS,
    OUTPUTS,
    PUBLISH,
    RECOMBINE,
    Components,
)
from fedloom.clients.objectives.components.session import class_tensors
from fedloom.clients.objectives.components.sharing import ALONE, EXTRACTOR, HEAD
from fedloom.clients.objectives.plain import below
from fedloom.clients.protocol.messages import COMPONENTS, MODEL, TOTAL, right_of
from fedloom.clients.protocol.reply_checks import ReplyError, can_be
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.ledger.declared import PerClientSlot, Slot
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import looked_at
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import ResidualInfluence, Strategy
from fedloom.server.strategies.by_architecture import cast
from fedloom.server.strategies.components.classes import Kinds, check_alike

TRAINED = "trained"  # slot: of each site that it has trained, so that it goes on from there
MATRIX = "recombination"  # kept: right answers and images, [sites, sites] each, by place in the roster
RIGHT_OF, IMAGES = "right", "images"


@dataclass(frozen=True)
class Recombining(Strategy):
    """A method whose sites keep networks of their own, and whose parts are put together at the end."""

    every: int = option(0, "rounds from one measurement of all pairs to the next; 0: after the last one alone", low=0)
    alike: list[Any] = option([], "lists of names that different data sets have for one class: [[car, automobile], ...]")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """What sites published, and that they trained."""
        return {COMPONENTS: PerClientSlot(), TRAINED: PerClientSlot()}

    def check(self, experiment: Experiment) -> None:
        """UserError for another objective, and for networks whose parts cannot be exchanged, naming both."""
        objective = components_of(experiment)
        check_alike(self.alike)
        if experiment.data.heads == "task":
            raise UserError("data.heads: strategy head_transfer takes shared or own: a head has its own site's classes")
        names = {site.name for site in experiment.sites}
        if odd := next((name for name in objective.private if name not in names), ""):
            raise UserError(f"objective.private: there is no site '{odd}'")
        objective.published("")
        check_parts(experiment)

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Not to measure with BatchNorm's stored statistics (Sec. C.1): they are of other features than a head then gets.
        And which names of `alike` no site's classes have, where they are known."""
        found: list[str] = []
        if experiment.evaluation.statistics == "running" and any(
            name.endswith("running_mean")
            for architecture in {experiment.architecture(site) for site in experiment.sites}
            for name in shapes(architecture)
        ):
            told = "stored statistics are of other features than an exchanged head gets, and spoil what is measured"
            source = "(32.4 % in Gygli et al. 2021, App. C.1)"
            found.append(f"evaluation.statistics=running: {told} {source}; take batch or recomputed")
        if self.alike and has_data(experiment.config):
            sites = experiment.sites
            known = Kinds.of(experiment, sites, {site.name: class_things(site.spec) for site in sites}, ()).all()
            odd = [name for group in self.alike for name in group if name not in known]
            found += [f"{unknown('class in strategy.alike', name, known)}; it changes nothing" for name in odd]
        return found

    def round(self, context: RoundContext) -> None:
        """Training and, when it is due, what sites publish and how it fits together."""
        self.train(context)
        length = self.schedule(context.experiment).length(context.config.rounds)
        if context.number >= length or (self.every and context.number % self.every == 0):
            self.publish(context)
            self.recombine(context)

    @abstractmethod
    def train(self, context: RoundContext) -> None:
        """The method's own part of a round."""

    def publish(self, context: RoundContext) -> None:
        """Ask for the components that sites let others have, and keep them."""
        likes = {site.name: _published(context.experiment, site) for site in context.sites}
        asked = [site for site in self.networked(context) if likes[site.name]]
        expected = {site.name: RecordSpec(likes[site.name], bounded=False, whole=False, check=_whole_parts(likes[site.name]))
                    for site in asked}  # fmt: skip
        for reply in context.ask(PUBLISH, {}, lambda site: {COMPONENTS: expected[site.name]}, asked, needed=False):
            if reply[COMPONENTS]:
                context.put(COMPONENTS, reply.site, reply[COMPONENTS])

    def recombine(self, context: RoundContext) -> None:
        """Ask every site how good each published head is on its extractor."""
        places = {site.name: site.index for site in context.config.roster}
        kinds = self.kinds(context)
        config = context.config
        there = looked_at(config, [site for site in self.published(context) if site in kinds.names])
        heads = {site: part for site in there if (part := self.component(context, site, HEAD))}
        extractors = looked_at(config, [site.name for site in self.networked(context) if site.name in kinds.names])
        asked = [site for site in self.networked(context) if site.name in set(extractors)]
        if not heads or not asked:
            return
        known, records = kinds.all(), {f"{MODEL}/{places[site]}": part for site, part in heads.items()}
        outputs = {site: kinds.places(site, known) for site in {*heads, *(site.name for site in asked)}}

        def content(site: Site) -> dict[str, State]:
            return {**records, **{f"{KINDS}{places[head]}": {OUTPUTS: outputs[head], LABELS: outputs[site.name]}
                                  for head in heads}}  # fmt: skip

        size = len(places)
        right, images = torch.zeros(size, size, dtype=torch.int64), torch.zeros(size, size, dtype=torch.int64)
        numbers = [name for record in records for name in (right_of(record), f"{TOTAL}/{record.removeprefix(MODEL + '/')}")]
        for reply in context.ask(RECOMBINE, content, {}, asked, metrics=numbers, needed=False):
            for head in heads:
                hits, total = reply.metrics[right_of(f"{MODEL}/{places[head]}")], reply.metrics[f"{TOTAL}/{places[head]}"]
                if can_be(hits, total):
                    right[reply.site.index, places[head]], images[reply.site.index, places[head]] = hits, total
        context.save_server_state(MATRIX, {RIGHT_OF: right, IMAGES: images})

    def recompute_derived(self, context: RoundContext) -> None:
        """What was measured with components of sites that are gone is erased."""
        if MATRIX not in context.slots.keeps():
            return
        here = torch.zeros(len(context.config.roster), dtype=torch.bool)
        here[[site.index for site in context.sites]] = True
        context.save_server_state(
            MATRIX, {name: table * (here[:, None] & here[None, :]) for name, table in context.server_state(MATRIX).items()}
        )

    def models(self, view: View) -> Models:
        """The networks of which sites published both parts."""

        def own(site: Site) -> Model:
            domains = (label(site.spec),) if view.config.data.heads == "own" else None  # other domains' classes are others
            return Model(view.architecture(site), _cast(view, site), domains)

        whole = [site for site in view.sites if site.name in self.published(view)
                 and all(self.component(view, site.name, prefix) for prefix in (EXTRACTOR, HEAD))]  # fmt: skip
        return Models({site.name: lambda site=site: own(site) for site in whole})

    def summary_entries(self, view: View) -> Mapping[str, Any]:
        """Recombination accuracy of every pair that was measured, and bytes that a site exchanges in a round."""
        if MATRIX not in view.slots.keeps():
            return {}
        here = {site.index: site.name for site in view.sites}
        table = view.server_state(MATRIX)
        places = [place for place in here if bool(table[IMAGES][place].any() or table[IMAGES][:, place].any())]
        cells = [[_share(table, row, column) for column in places] for row in places]
        mode = components_of(view.experiment).mode
        return {
            "recombination": {mode: {"sites": [here[place] for place in places], "accuracy": cells, **self.traffic(view)}}
        }

    def traffic(self, view: View) -> dict[str, int]:
        """Bytes that a site sends in a round, and those that it would send with FedAvg."""
        state = view.initial(site=view.sites[0])
        return {"bytes": _bytes(self.sent(view)), "fedavg_bytes": _bytes(state)}

    @abstractmethod
    def sent(self, view: View) -> State:
        """What a site sends in a round."""

    def kinds(self, context: RoundContext) -> Kinds:
        """The classes of all sites by name."""
        return Kinds.of(context.experiment, context.sites, context.class_names(context.sites), self.alike)

    def networked(self, context: RoundContext) -> list[Site]:
        """The sites that have a network of their own."""
        return [site for site in context.sites if context.has(TRAINED, site.name)]

    def published(self, view: View) -> list[str]:
        """The sites that published components."""
        return [site.name for site in view.sites if view.has(COMPONENTS, site.name)]

    def component(self, view: View, site: str, prefix: str) -> State:
        """The part of a site's network that it published (prefix: EXTRACTOR or HEAD); empty if it did not. UserError for a
        site that published none."""
        if not view.has(COMPONENTS, site):
            gone = site in {one.name for one in view.config.roster} - {one.name for one in view.sites}
            why = "it was forgotten, and its components are erased" if gone else "it published none"
            raise UserError(f"site '{site}' has no components in the catalogue: {why}")
        [one] = [one for one in view.sites if one.name == site]
        return {name: tensor for name, tensor in _cast(view, one).items() if name.startswith(prefix)}

    def mark(self, context: RoundContext, site: Site) -> None:
        """Note that a site trained: its own state is that after this round."""
        context.put(TRAINED, site, {"round": torch.tensor([float(context.number)])})

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """The other sites' networks, if anything was shared while the forgotten ones took part."""
        if components_of(view.experiment).mode == ALONE or view.rounds_with(names) < 2:
            return ()
        why = "after round 1 they were trained with parts that the forgotten sites had a share in"
        return (ResidualInfluence("the other sites' networks and what they published", why),)


def components_of(experiment: Experiment) -> Components:
    """The configured objective."""
    found = experiment.objective
    if not isinstance(found, Components):
        raise UserError(
            f"objective.name: got '{experiment.config.objective.get('name')}', strategy head_transfer takes components"
        )
    return found


def check_parts(experiment: Experiment) -> None:
    """UserError, naming both sites, if their heads are of different kinds or take different features."""
    sites = experiment.sites
    shapes = {architecture: head_shapes(architecture) for architecture in {experiment.architecture(site) for site in sites}}
    first = sites[0]
    for site in sites[1:]:
        one, other = shapes[experiment.architecture(first)], shapes[experiment.architecture(site)]
        if odd := next((name for name in {**one, **other} if one.get(name) != other.get(name)), ""):
            told = f"{site.name}'s head has '{odd}' {_told(other.get(odd))}, {first.name}'s {_told(one.get(odd))}"
            raise UserError(f"network: heads cannot be exchanged: {told}; give both one network.head (and network.channels)")


def head_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a head the shapes, without the rows of classes."""
    state, by_class = below(shapes(architecture), HEAD), class_tensors(architecture)
    return {name: tuple(tensor.shape[1:] if name in by_class else tensor.shape) for name, tensor in state.items()}


def feature_shape(architecture: Architecture) -> tuple[int, ...]:
    """Of the features of one image."""
    with torch.device("meta"), torch.no_grad():
        network = architecture.build().to("meta").eval()
        images = torch.zeros(1, architecture.channels, architecture.size, architecture.size)
        return tuple(network.extractor(images).shape[1:])


def _told(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"of {' x '.join(map(str, shape)) or 'one row'} (without rows of classes)"


def _cast(view: View, site: Site) -> State:
    """What a site published, bit for bit, with the types of its network."""
    return cast(view.slots.contributions.floats(site.name, COMPONENTS), shapes(view.architecture(site)))


def _published(experiment: Experiment, site: Site) -> State:
    prefixes = components_of(experiment).published(site.name)
    state = shapes(experiment.architecture(site))
    return {name: tensor for name, tensor in state.items() if prefixes and name.startswith(prefixes)}


@functools.lru_cache(maxsize=64)
def shapes(architecture: Architecture) -> State:
    """The tensors of a network of this architecture, without memory: names, shapes and types."""
    return {name: tensor.to("meta") for name, tensor in architecture.build().state_dict().items()}


def _whole_parts(like: Mapping[str, Tensor]) -> Any:
    """A check that a site publishes whole parts of its network or none of them."""

    def check(record: State) -> None:
        for prefix in (EXTRACTOR, HEAD):
            wanted = {name for name in like if name.startswith(prefix)}
            if wanted & record.keys() and not wanted <= record.keys():
                raise ReplyError(f"record '{COMPONENTS}' holds a piece of its {prefix[:-1]}; only whole ones are published")

    return check


def _share(table: Mapping[str, Tensor], row: int, column: int) -> float | None:
    total = int(table[IMAGES][row, column])
    return int(table[RIGHT_OF][row, column]) / total if total else None


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def check_outputs(experiment: Experiment) -> None:
    """UserError, naming both sites, if heads that all sites are sent would be of different numbers of classes."""
    first = experiment.sites[0]
    for site in experiment.sites:
        has, other = experiment.architecture(site).classes, experiment.architecture(first).classes
        if has != other:
            told = f"{site.name}'s has {has} classes, {first.name}'s {other}"
            raise UserError(f"objective.mode={components_of(experiment).mode} takes one head for all sites; {told}")
