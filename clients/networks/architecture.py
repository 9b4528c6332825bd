"""Architectures, which may differ between sites, and models: an architecture with its weights."""

import contextlib
import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedloom.clients.data import class_count, domain_specs, input_form, num_classes
from fedloom.clients.data.form import Form
from fedloom.clients.networks.base import NETWORKS, WEIGHT_OPTIONS, Network
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State


@dataclass(frozen=True)
class Architecture:
    """Everything that builds a network: its section as JSON, and the form of its inputs and outputs."""

    network: str
    form: Form
    freeze: tuple[str, ...] = ()  # patterns of the tensors that stay as they start

    @property
    def outputs(self) -> int:
        """The numbers that the network returns for an example, or for each step."""
        return self.form.outputs

    def with_outputs(self, outputs: int) -> "Architecture":
        """Return this architecture with another number of outputs."""
        return replace(self, form=replace(self.form, outputs=outputs))

    def build(self) -> Network:
        """Build the network with undefined weights. Raises UserError for an unknown network or a wrong option."""
        network = _spec(self.network).empty(self.form)
        if not self.freeze:
            return network
        from fedloom.clients.networks.start import freeze  # imported only where it is used

        return freeze(network, self.freeze)

    def made(self) -> Network:
        """Build the network on torch's default device, with the initial weights that its own code draws."""
        return _spec(self.network).build(self.form)

    @property
    def options(self) -> dict[str, Any]:
        """The section `network` of a configuration."""
        return json.loads(self.network)


@dataclass(frozen=True)
class Model:
    """A network that the server can measure and save: its architecture and its state.

    `domains`: labels of the domains to measure it on; None: all. `facts`: more entries for the summary, by key.
    """

    architecture: Architecture
    state: State
    domains: tuple[str, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Model({self.architecture.options.get('name')}, {len(self.state)} tensors)"


@functools.lru_cache(maxsize=256)
def _spec(network: str) -> Any:
    return NETWORKS.build(json.loads(network), "network")


def architecture_of(config: Config, site: Site | None = None) -> Architecture:
    """Return the architecture of a site, or (None) of the configuration's `network`."""
    section = _section(config, site)
    if not any(key in section for key in WEIGHT_OPTIONS):
        return Architecture(network_text(config, site), form_of(config, site))
    from fedloom.clients.networks.start import weight_options  # imported only where it is used

    return Architecture(_without_weights(section), form_of(config, site), tuple(weight_options(section).freeze))


def start_of(config: Config, site: Site | None = None) -> str:
    """Return the file that the network of a site, or (None) of the configuration, starts from; empty without one."""
    return str(_section(config, site).get("start") or "")


def form_of(config: Config, site: Site | None = None) -> Form:
    """Return the form of a site's inputs and outputs, or (None) that of the configuration's networks."""
    own = site is not None and config.data.heads == "own"
    classes = class_count(site.spec) if site is not None and own else num_classes(config)
    spec = site.spec if site is not None else next(iter(domain_specs(config).values()))
    return input_form(config, spec, classes)


def network_text(config: Config, site: Site | None = None) -> str:
    """Return the section `network` of a site, or (None) of the configuration, as JSON."""
    return json.dumps(_section(config, site), sort_keys=True)


def _section(config: Config, site: Site | None) -> dict[str, Any]:
    return (_own(site) if site is not None else {}) or config.network


def check_own_options(config: Config) -> None:
    """Raise UserError, with the site's name, for a site's own network that is unknown or has a wrong option.

    Reads no data.
    """
    first = _own_sections(config)
    for text, site in first.items():
        section = json.loads(text)
        with _named(site):
            _spec(_without_weights(section))
            if any(key in section for key in WEIGHT_OPTIONS):
                from fedloom.clients.networks.start import weight_options  # imported only where it is used

                weight_options(section)
    _check_unused(config.roster, first)


def check_own_networks(config: Config) -> None:
    """Raise UserError, with the site's name, if a site's own network does not fit the data or the file it starts from."""
    for site in _own_sections(config).values():
        with _named(site):
            network = architecture_of(config, site).build()
            if path := start_of(config, site):
                from fedloom.clients.networks.start import started  # imported only where it is used

                started(network.state_dict(), path, network)


def _own_sections(config: Config) -> dict[str, Site]:
    """Return the distinct sections of sites' own networks, as JSON, each with its first site."""
    first: dict[str, Site] = {}
    for site in config.roster:
        if section := _own(site):
            first.setdefault(json.dumps(section, sort_keys=True), site)
    return first


@contextlib.contextmanager
def _named(site: Site) -> Iterator[None]:
    """Add the site's name to UserErrors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{site.name} ({site.spec.domain}): {error}") from None


def _without_weights(section: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in section.items() if key not in WEIGHT_OPTIONS}, sort_keys=True)


def _check_unused(sites: Sequence[Site], checked: Collection[str]) -> None:
    """Raise UserError for a network in a list `networks` that is unknown or has a wrong option, and that no site has."""
    lists = {id(site.spec.networks): site for site in sites if site.spec.networks}  # sites of one entry share it
    unused = {text: (site, number) for site in lists.values() for number, section in enumerate(site.spec.networks)
              if (text := json.dumps(section, sort_keys=True)) not in checked}  # fmt: skip
    for text, (site, number) in unused.items():
        try:
            _spec(_without_weights(json.loads(text)))
        except UserError as error:
            raise UserError(f"networks[{number}] of {site.spec.domain}: {error}") from None


def _own(site: Site) -> dict[str, Any]:
    """Return the section of the site's own network; empty if the configuration sets none."""
    several = site.spec.networks
    return several[site.part % len(several)] if several else site.spec.network
