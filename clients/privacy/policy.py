"""A site's own policy in a real federation: its node-config, not the server, says what it reads and runs."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import RecordDict

from fedloom.clients.data import domain_names
from fedloom.clients.data.partition import WAYS
from fedloom.clients.data.variants import class_count, outputs
from fedloom.clients.networks import NETWORKS
from fedloom.clients.networks.base import PARTS
from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.privacy.limits import Limits, check_harmless
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import ENROL, EVALUATE, SECURE_KINDS, TRAIN, TaskInstructions, content_bytes
from fedloom.clients.protocol.signatures import Identity
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.schedules import SCHEDULES, schedule_section
from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State

NOTHING = "none"
LISTS = ("networks", "objectives", "optimizers", "publish", "strategies", "disclose")
SCORES, BY_CLASS = "scores", "classes"  # what a site may let the server hear of its images
DISCLOSED = (SCORES, BY_CLASS)
DEVICES = ("", "auto", "cpu", "cuda")
MASKS = ("", "required")
HARMLESS = (ENROL, *SECURE_KINDS)  # kinds of questions that tell nothing of a site's images but their number
MOST_STEPS, MOST_PARAMETERS, LEAST_BATCH = 100_000, 500.0, 8  # defaults of a site's limits (clients.privacy.limits)


@dataclass(frozen=True)
class Policy:
    """What a node's node-config says of its site.

    `data`: the folder with its data. `domain`: its own data in any form that `domain:` takes in a configuration, read in
    place of what the server's says for it. `networks`, `objectives`, `optimizers`: the names that it is willing to run;
    none: all that this project ships, nothing from outside. `publish`: which components of its network others may have
    (extractor, head), `none`: none; empty: what the server's configuration says. `strategies`: of runs that it takes part
    in; none: any. `device`: where it computes (auto, cpu, cuda), whatever the server's configuration says; `gpu`: its share
    of a GPU's memory, from 0 to 1; `largest_order`: MB of a message, above which it answers nothing; 0: any. `masks`:
    `required`: what it trains leaves it under secure aggregation only, and it answers no question that tells more of its
    images than their number. `epsilon`: what all its rounds together may cost of its privacy; 0: any.
    `disclose`: what the server may hear: `scores` (losses and accuracies) also where the site hides what it trains, and
    `classes` (right answers by class). `min_members`, `min_known`: fewest sites of a masked sum, and of those whose keys are
    in `peers`; None: clients.privacy.secure_aggregation.members. `limits`: what one order may cost.
    `identity`: how it signs, and knows others' signatures. `name`: the site's own; empty: the one at its place of the
    server's roster.
    """

    data: str = ""
    domain: str = ""
    networks: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    device: str = ""
    gpu: float = 1.0
    largest_order: float = 0.0
    masks: str = ""
    epsilon: float = 0.0
    identity: Identity = field(default_factory=Identity)
    name: str = ""
    disclose: tuple[str, ...] = ()
    min_members: int | None = None
    min_known: int | None = None
    limits: Limits = field(default_factory=Limits)

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "Policy":
        """The policy in a node-config, whose names are separated by commas."""
        here = {key: str(node_config.get(key, "")) for key in ("data", "domain", "device", "masks", *LISTS)}
        names = {key: _names(here[key]) for key in LISTS}
        if odd := next((name for name in names["publish"] if name not in (*PARTS, NOTHING)), ""):
            raise UserError(f"publish: got '{odd}', takes extractor, head, both separated by a comma, or none")
        if odd := next((name for name in names["disclose"] if name not in DISCLOSED), ""):
            raise UserError(f"disclose: got '{odd}', takes scores, classes, or both separated by a comma")
        if here["device"] not in DEVICES:
            raise UserError(f"device: got '{here['device']}', takes auto, cpu or cuda")
        if here["masks"] not in MASKS:
            raise UserError(f"masks: got '{here['masks']}', takes required, or nothing")
        gpu, most = _number(node_config, "gpu", 1.0, 1.0), _number(node_config, "largest_order", 0.0)
        cost = _number(node_config, "epsilon", 0.0)
        batch = LEAST_BATCH if here["masks"] or cost else 1
        limits = Limits(_whole(node_config, "max_steps", MOST_STEPS) or 0,
                        _number(node_config, "max_parameters", MOST_PARAMETERS),
                        _whole(node_config, "min_batch", batch) or 0)  # fmt: skip
        identity = Identity(*(os.path.expanduser(str(node_config.get(key, ""))) for key in ("identity", "peers")))
        return Policy(here["data"], here["domain"], device=here["device"], gpu=gpu, largest_order=most, masks=here["masks"],
                      epsilon=cost, identity=identity, name=str(node_config.get("site", "")), limits=limits,
                      min_members=_whole(node_config, "min_members"), min_known=_whole(node_config, "min_known"),
                      **names)  # fmt: skip

    def hides(self, config: Config) -> bool:
        """Whether nobody is to hear of this site's images more than a sum over sites, or than noise lets through."""
        return bool(self.masks or self.epsilon or config.federation.secure_aggregation or config.privacy.noise)

    def tells_scores(self, config: Config) -> bool:
        """Whether the server may hear this site's losses and accuracies."""
        return SCORES in self.disclose or not self.hides(config)

    def tells_classes(self, config: Config) -> bool:
        """Whether the server may hear this site's right answers by class, and so how many images it has of each."""
        return BY_CLASS in self.disclose and self.tells_scores(config)

    def check_question(self, order: TaskInstructions, config: Config) -> None:
        """RefusedError for a question to a site that hides what it trains, if the answer would be neither summed nor noised:
        exact scores tell images, and so do statistics."""
        if order.kind in (TRAIN, *HARMLESS) or not self.hides(config):
            return
        if order.kind != EVALUATE:
            raise RefusedError(f"order.kind: '{order.kind}' asks for more than sums, and this site hides what it trains, or "
                               "the run does (masks or noise)")  # fmt: skip
        if not self.tells_scores(config):
            told = "tells no scores under masks or noise; its owner may allow them (site.yaml: disclose)"
            raise RefusedError(f"order.kind: '{EVALUATE}' asks for accuracies, and this site {told}")

    def check_secure_aggregation(self, order: TaskInstructions) -> None:
        """RefusedError for an order whose answer would tell what this policy wants hidden."""
        if not self.masks or order.kind in (*HARMLESS, EVALUATE) or (order.kind == TRAIN and order.secure):
            return
        told = "takes part under masks only (site.yaml: masks); the run needs federation.secure_aggregation=true"
        raise RefusedError(f"order.kind: '{order.kind}' asks for more than sums, and this site {told}")

    def check_privacy_budget(self, order: TaskInstructions, config: Config) -> None:
        """RefusedError for an order whose answer would cost of this site's privacy what its `epsilon` does not count."""
        if not self.epsilon or order.kind in (*HARMLESS, EVALUATE) or (order.kind == TRAIN and config.privacy.noise):
            return
        told = "lets out what is noised only (site.yaml: epsilon); the run needs privacy.clip and privacy.noise"
        raise RefusedError(f"order.kind: '{order.kind}' asks for what is not noised, and this site {told}")

    def check_message_size(self, content: RecordDict) -> None:
        """RefusedError for a message that is larger than this policy takes."""
        size = content_bytes(content) / 1e6
        if 0 < self.largest_order < size:
            told = f"has {size:.1f} MB, and this site's policy takes {self.largest_order:g}"
            raise RefusedError(f"order: {told} (site.yaml: largest_order)")

    def apply(self, config: Config, place: int) -> Config:
        """The server's configuration as the site at this place of the roster follows it: its data are where it has them.

        Raises RefusedError, before anything is imported or opened, for names that this policy does not allow. Domains of
        any names are allowed where nobody looks them up: shared heads of data.classes outputs, own data at this site.
        """
        sites = config.roster
        if not 0 <= place < len(sites):
            raise UserError(f"order.site: is no place among the configuration's {len(sites)} sites")
        site = sites[place]
        if self.name not in ("", site.name):
            raise RefusedError(f"order.site: is the place of '{site.name}', and this site is '{self.name}'")
        key = f"sites[{place}]"
        for where, section in {"network": config.network, f"{key}.network": getattr(site.spec, "network", {})}.items():
            if section:
                self._allow_all(NETWORKS, self.networks, section, where)
        self._allow_all(OBJECTIVES, self.objectives, config.objective, "objective")
        self._allow_all(OPTIMIZERS, self.optimizers, optimizer_section(config.training), "training.optimizer")
        self._allow_all(SCHEDULES, (), schedule_section(config.training), "training.schedule")
        if self.strategies and (name := config.strategy.get("name")) not in self.strategies:
            told = f"'{name}' is not among the strategies of this site's policy ({', '.join(self.strategies)})"
            raise RefusedError(f"strategy.name: {told}")
        by_label = site.spec.classes or site.spec.partition.name in ("classes", "dirichlet")
        if (self.masks or self.epsilon) and not self.domain and by_label:
            which = "classes" if site.spec.classes else "partition"
            raise RefusedError(f"{key}.{which}: how many images of chosen classes there are tells this site's labels, which "
                               "it hides; leave it out, or name the site's own data (site.yaml: domain)")  # fmt: skip
        if not self.domain and site.spec.partition.name not in WAYS:
            told = f"'{site.spec.partition.name}' is none of this project's ways to divide"
            raise RefusedError(f"{key}.partition.name: {told}; a site imports none that a server names")
        shipped, unread = set(domain_names()), bool(config.data.heads == "shared" and config.data.classes)
        for one in sites:
            if one.spec.domain not in shipped and not (unread and (self.domain or one is not site)):
                told = f"'{one.spec.domain}' is none of this project's domains"
                raise RefusedError(f"sites[{one.index}].domain: {told}; a site opens and imports none that a server names")
        self.limits.check(config, site)
        if self.hides(config):
            check_harmless(config)
        threads = min(config.engine.threads, os.cpu_count() or 1)
        engine = replace(config.engine, device=self.device or config.engine.device, threads=threads)
        return replace(config, data=replace(config.data, root=self.data, download=False), engine=engine)

    def source(self, config: Config, site: Site) -> Site:
        """The site with the domain that its images are read from: whole if it is the policy's own.

        UserError if that has more classes than the server's configuration gives the site.
        """
        if not self.domain:
            return site
        spec = replace(site.spec, domain=self.domain, partition=replace(site.spec.partition, name="iid", options={}))
        if self.hides(config):  # of chosen classes, the number of images would tell how many the site has
            spec = replace(spec, classes=[], samples=0, relabel=False)
        own = replace(site, spec=spec, part=0, parts=1)
        has, head = class_count(own.spec), outputs(config, site.spec)
        if has > (takes := head.stop - head.start):
            raise UserError(f"the policy's domain has {has} classes, the federation's configuration {takes} for this site")
        return own

    def filter_published(self, state: State) -> State:
        """Of components that are to be published, those that this policy lets go."""
        prefixes = tuple(PARTS[name] for name in self.publish if name in PARTS)
        return {name: one for name, one in state.items() if not self.publish or (prefixes and name.startswith(prefixes))}

    def _allow_all(self, registry: Registry[Any], named: tuple[str, ...], section: Mapping[str, Any], where: str) -> None:
        """Refuse a section whose name, or that of a section inside it, is not allowed: both may be imported."""
        self._allow(registry, named, section.get("name"), where)
        if registry.shipped(str(section.get("name"))):  # what is inside another's is its own business
            for place, kind, name in _inside(section, where, registry):
                self._allow(kind, named, name, place)

    def _allow(self, registry: Registry[Any], named: tuple[str, ...], name: Any, where: str) -> None:
        if name in named or (not named and isinstance(name, str) and registry.shipped(name)):
            return
        allowed = f"it names {', '.join(named)}" if named else "it names none, so all that this project ships are"
        raise RefusedError(f"{where}.name: '{name}' is not among the {registry.kind}s of this site's policy ({allowed})")


def _inside(section: Mapping[str, Any], where: str, registry: Registry[Any]) -> Iterator[tuple[str, Registry[Any], Any]]:
    """The names that the sections inside a section give: the dotted key, what kind of thing it names, and the name."""
    for key, item in section.items():
        kind = _auxiliary() if key == "auxiliary" else registry
        for place, one in enumerate(item) if isinstance(item, list | tuple) else [("", item)]:
            path = f"{where}.{key}" + (f"[{place}]" if place != "" else "")
            if isinstance(one, Mapping) and "name" in one:
                yield path, kind, one["name"]
                yield from _inside(one, path, kind)
            elif key == "auxiliary":
                yield path, kind, one


def _auxiliary() -> Registry[Any]:
    from fedloom.clients.objectives.components.auxiliary import AUXILIARY

    return AUXILIARY


def _number(node_config: Mapping[str, Any], key: str, default: float, most: float = math.inf) -> float:
    given = node_config.get(key, default)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= most:
        raise UserError(f"{key}: got {given!r}, takes a number from 0" + (f" to {most:g}" if math.isfinite(most) else " on"))
    return float(given)


def _whole(node_config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    given = node_config.get(key, default)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise UserError(f"{key}: got {given!r}, takes a whole number from 0 on")
    return given


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))
