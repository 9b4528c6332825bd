"""A site's own policy in a real federation: its node-config, not the server, says what it reads and runs."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedloom.clients.data import domain_names
from fedloom.clients.data.domains import find
from fedloom.clients.data.forms import schema_of, with_form
from fedloom.clients.data.partition import WAYS
from fedloom.clients.data.standardise import STATISTICS
from fedloom.clients.data.variants import class_count, outputs
from fedloom.clients.networks import NETWORKS
from fedloom.clients.networks.base import PARTS
from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.privacy.limits import Limits, check_harmless, count, names, number, switch
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import ENROL, EVALUATE, SECURE_KINDS, TRAIN, TaskInstructions
from fedloom.clients.protocol.signatures import Identity
from fedloom.clients.training.loss import LOSSES, loss_section
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.schedules import SCHEDULES, schedule_section
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import is_reference
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.shorthand import expand_shorthand
from fedloom.conf.sites import PartitionConfig, Site
from fedloom.fusion.state import State

NOTHING = "none"
LISTS = ("networks", "objectives", "optimizers", "publish", "strategies", "disclose")
SCORES, BY_CLASS = "scores", "classes"  # what a site can let the server know about its images
DISCLOSED = (SCORES, BY_CLASS)
DEVICES = ("", "auto", "cpu", "cuda")
MASKS = ("", "required")
HARMLESS = (ENROL, *SECURE_KINDS)  # kinds of questions that reveal nothing about a site's images except their number


@dataclass(frozen=True)
class Policy:
    """What a node's node-config says about its site.

    Attributes:
        data: The folder with its data.
        domain: Its own data, in any form that `domain:` takes; it replaces the domain in the server's configuration.
        networks: Names of networks that it runs; empty: all that this project ships, nothing from outside.
        objectives: The same for objectives.
        optimizers: The same for optimizers.
        publish: Components of its network that others can have (extractor, head); `none`: no component; empty: as the
            server's configuration says.
        strategies: Strategies of runs in which it participates; empty: any.
        device: Where it computes (auto, cpu, cuda), whatever the server's configuration says.
        gpu: Its share of a GPU's memory, 0 to 1.
        compile: Whether it runs torch's compiler if the server's configuration says so (engine.compile).
        masks: `required`: what it trains leaves only under secure aggregation, and it answers no question that
            reveals more about its images than their number.
        epsilon: The most that all its rounds together can cost of its privacy; 0: no limit.
        identity: Its key for signatures, and others' public keys.
        name: The site's own name; empty: the name at its index in the server's roster.
        disclose: What the server can know: `scores` (losses and accuracies) also where the site hides what it trains;
            `classes` (right answers by class).
        min_members: Fewest sites of a masked sum; None: see clients.privacy.secure_aggregation.members.
        min_known: Fewest of them whose keys are in `peers`; None: see the same.
        limits: The most that one order can cost.
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
    compile: bool = False
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
        """Return the policy in a node-config. Lists are texts with commas. Raises UserError for an invalid value."""
        texts: dict[str, Any] = {key: str(node_config.get(key, "")) for key in ("data", "domain", "device", "masks")}
        lists: dict[str, Any] = {key: names(node_config, key) for key in LISTS}
        if odd := next((name for name in lists["publish"] if name not in (*PARTS, NOTHING)), ""):
            raise UserError(f"publish: got '{odd}', takes extractor, head, both separated by a comma, or none")
        if NOTHING in lists["publish"] and len(lists["publish"]) > 1:
            raise UserError(f"publish: got '{node_config['publish']}'; take none alone, or only the parts")
        if odd := next((name for name in lists["disclose"] if name not in DISCLOSED), ""):
            raise UserError(f"disclose: got '{odd}', takes scores, classes, or both separated by a comma")
        if texts["device"] not in DEVICES:
            raise UserError(f"device: got '{texts['device']}', takes auto, cpu or cuda")
        if texts["masks"] not in MASKS:
            raise UserError(f"masks: got '{texts['masks']}', takes required, or nothing")
        epsilon = number(node_config, "epsilon", 0.0)
        return Policy(gpu=number(node_config, "gpu", 1.0, 1.0), compile=switch(node_config, "compile"), epsilon=epsilon,
                      identity=_identity(node_config), name=str(node_config.get("site", "")),
                      limits=Limits.of(node_config, hides=bool(texts["masks"] or epsilon)),
                      min_members=count(node_config, "min_members"), min_known=count(node_config, "min_known"),
                      **texts, **lists)  # fmt: skip

    @property
    def code(self) -> frozenset[str]:
        """The names of code from outside this project that the site runs."""
        own = (self.domain, self.domain.partition("?")[0]) if self.domain else ()
        return frozenset((*self.networks, *self.objectives, *self.optimizers, *own))

    def hides(self, config: Config) -> bool:
        """Return whether masks or noise, of this policy or the run, hide what this site trains."""
        return bool(self.masks or self.epsilon or config.federation.secure_aggregation or config.privacy.noise)

    def tells_scores(self, config: Config) -> bool:
        """Return whether the server can know this site's losses and accuracies."""
        return SCORES in self.disclose or not self.hides(config)

    def tells_classes(self, config: Config) -> bool:
        """Return whether the server can know this site's right answers by class, and so its number of images by class."""
        return BY_CLASS in self.disclose and self.tells_scores(config)

    def check_question(self, order: TaskInstructions, config: Config) -> None:
        """Raise RefusedError for a question whose answer is neither summed nor noised, to a site that hides its training.

        Exact scores reveal images, and so do statistics.
        """
        if order.kind in (TRAIN, *HARMLESS) or (order.kind == STATISTICS and order.secure) or not self.hides(config):
            return
        if order.kind != EVALUATE:
            raise RefusedError(f"order.kind: '{order.kind}' asks for more than sums, but this site hides what it trains, or "
                               "the run does (masks or noise)")  # fmt: skip
        if not self.tells_scores(config):
            reason = "discloses no scores under masks or noise; its owner can allow them (site.yaml: disclose)"
            raise RefusedError(f"order.kind: '{EVALUATE}' asks for accuracies, but this site {reason}")

    def check_secure_aggregation(self, order: TaskInstructions) -> None:
        """Raise RefusedError, under `masks`, for an order whose answer would reveal more than masked sums."""
        if not self.masks or order.kind in (*HARMLESS, EVALUATE) or (order.kind in (TRAIN, STATISTICS) and order.secure):
            return
        reason = "participates only under masks (site.yaml: masks); set federation.secure_aggregation=true for the run"
        raise RefusedError(f"order.kind: '{order.kind}' asks for more than sums, but this site {reason}")

    def check_privacy_budget(self, order: TaskInstructions, config: Config) -> None:
        """Raise RefusedError, under `epsilon`, for an order whose answer is not noised, and so not counted."""
        if not self.epsilon or order.kind in (*HARMLESS, EVALUATE) or (order.kind == TRAIN and config.privacy.noise):
            return
        reason = "sends only what is noised (site.yaml: epsilon); set privacy.clip and privacy.noise for the run"
        raise RefusedError(f"order.kind: '{order.kind}' asks for what is not noised, but this site {reason}")

    def apply(self, config: Config, place: int) -> Config:
        """Return the server's configuration with this policy's data folder and device, for site `place` of the roster.

        A domain with any name is allowed if no one looks it up: shared heads with data.classes outputs, own
        data at this site. Raise RefusedError if the policy does not allow a name. This is checked before anything is
        imported or opened.
        """
        sites = config.roster
        if not 0 <= place < len(sites):
            raise UserError(f"order.site: is not the index of one of the configuration's {len(sites)} sites")
        site = sites[place]
        if self.name not in ("", site.name):
            raise RefusedError(f"order.site: is the index of '{site.name}', but this site is '{self.name}'")
        key = f"sites[{place}]"
        several = {f"{key}.networks[{number}]": section for number, section in enumerate(site.spec.networks)}
        for where, section in {"network": config.network, f"{key}.network": site.spec.network, **several}.items():
            if section:
                self._allow_all(NETWORKS, self.networks, section, where)
        self._allow_all(OBJECTIVES, self.objectives, config.objective, "objective")
        self._allow_all(OPTIMIZERS, self.optimizers, optimizer_section(config.training), "training.optimizer")
        self._allow_all(SCHEDULES, (), schedule_section(config.training), "training.schedule")
        self._allow_all(LOSSES, (), loss_section(config.training), "training.loss")
        if self.strategies and (name := config.strategy.get("name")) not in self.strategies:
            reason = f"'{name}' is not among the strategies of this site's policy ({', '.join(self.strategies)})"
            raise RefusedError(f"strategy.name: {reason}")
        by_label = site.spec.classes or site.spec.partition.name in ("classes", "dirichlet")
        if (self.masks or self.epsilon) and not self.domain and by_label:
            which = "classes" if site.spec.classes else "partition"
            raise RefusedError(f"{key}.{which}: the number of images of chosen classes would reveal this site's labels, "
                               "which it hides; remove it, or name the site's own data (site.yaml: domain)")  # fmt: skip
        if not self.domain and site.spec.partition.name not in WAYS:
            reason = f"'{site.spec.partition.name}' is not one of this project's ways to divide data"
            raise RefusedError(f"{key}.partition.name: {reason}; a site does not import what a server names")
        shipped, unread = set(domain_names()), bool(config.data.heads == "shared" and config.data.classes)
        for other in sites:
            if other.spec.domain not in shipped and not (unread and (self.domain or other is not site)):
                reason = f"'{other.spec.domain}' is not one of this project's domains"
                raise RefusedError(f"sites[{other.index}].domain: {reason}; a site does not open or import what a server "
                                   "names. Set data.classes and data.heads=shared, so that sites with own data "
                                   "do not look it up.")  # fmt: skip
        self.limits.check(with_form(config, place, bool(self.domain)), site)
        if self.hides(config):
            check_harmless(config)
        threads = min(config.engine.threads, os.cpu_count() or 1)
        compile = config.engine.compile and self.compile
        engine = replace(config.engine, device=self.device or config.engine.device, threads=threads, compile=compile)
        return replace(config, data=replace(config.data, root=self.data, download=False), engine=engine)

    def source(self, config: Config, site: Site, enrols: bool = False) -> Site:
        """Return the site with the domain to read: the server's, or the whole of the policy's own domain if there is one.

        Raise UserError if its examples do not fit the server's configuration. `enrols`: a table may have another number
        of columns, because the server compares them.
        """
        if not self.domain:
            return site
        undivided = PartitionConfig(min_samples=site.spec.partition.min_samples)
        spec = replace(site.spec, domain=self.domain, partition=undivided)
        if self.hides(config):  # with chosen classes, the number of images would reveal how many the site has
            spec = replace(spec, classes=[], samples=0, relabel=False)
        own = replace(site, spec=spec, part=0, parts=1)
        schema, own_schema = schema_of(config, site.spec), find(self.domain).schema
        if enrols and own_schema.columns:
            own_schema = replace(own_schema, shape=schema.shape)
        if difference := schema.difference(own_schema):
            parts = {"kind": own_schema.kind, "shape": [*own_schema.shape], "task": own_schema.task}
            form = ", ".join(f"{key}: {value}" for key, value in parts.items() if value)
            raise UserError(f"data.form: the run and this site's domain have different examples, {difference}. "
                            f"If this site is right, the server sets data.form={{{form}}}")  # fmt: skip
        has, head = class_count(own.spec), outputs(config, site.spec)
        if has > (takes := head.stop - head.start):
            raise UserError(
                f"the policy's domain has {has} classes, but the federation's configuration {takes} for this site"
            )
        return own

    def filter_published(self, state: State) -> State:
        """Return only the tensors of `state` that belong to components in `publish`; all if `publish` is empty."""
        prefixes = tuple(PARTS[name] for name in self.publish if name in PARTS)
        return {
            name: tensor for name, tensor in state.items() if not self.publish or (prefixes and name.startswith(prefixes))
        }

    def _allow_all(self, registry: Registry[Any], named: tuple[str, ...], section: Mapping[str, Any], where: str) -> None:
        """Refuse a section with a name that is not allowed, also in inner sections. `only` (conf.plugins) is the last guard.

        Networks in networks must be allowed. Names in other sections are of other kinds; only code from outside is refused.
        """
        self._allow(registry, named, section.get("name"), where)
        for path, name in _inside(registry, section, where):
            if registry is NETWORKS or (is_reference(name) and name not in named):
                self._allow(registry, named, name, path)

    def _allow(self, registry: Registry[Any], named: tuple[str, ...], name: Any, where: str) -> None:
        if name in named or (not named and isinstance(name, str) and registry.shipped(name)):
            return
        allowed = f"it names {', '.join(named)}" if named else "it names none, so all that this project ships are"
        raise RefusedError(f"{where}.name: '{name}' is not among the {registry.kind}s of this site's policy ({allowed})")


def _inside(registry: Registry[Any], section: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the name of each inner section. Those of another's class are its own business."""
    name = section.get("name")
    if not (isinstance(name, str) and registry.shipped(name)):
        return
    for key, item in expand_shorthand(registry.get(name), section).items():
        for index, entry in enumerate(item) if isinstance(item, list | tuple) else [("", item)]:
            path = f"{where}.{key}" + (f"[{index}]" if index != "" else "")
            if isinstance(entry, Mapping) and "name" in entry:
                yield path, entry["name"]
                yield from _inside(registry, entry, path)
            elif is_reference(entry):
                yield path, entry


def _identity(node_config: Mapping[str, Any]) -> Identity:
    return Identity(*(os.path.expanduser(str(node_config.get(key, ""))) for key in ("identity", "peers")))
