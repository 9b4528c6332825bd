"""The options of a configuration: values by dotted keys, with types and defaults. Equal runs have equal values.

Shipped classes have all their options here. A class from elsewhere is not imported: its section has only the options in
the configuration.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from fedloom.clients.networks.base import NETWORKS
from fedloom.clients.networks.start import WeightOptions
from fedloom.clients.objectives.base import OBJECTIVES
from fedloom.clients.objectives.components.auxiliary import AUXILIARY
from fedloom.clients.objectives.layer_selection.learners import BASE_LEARNERS
from fedloom.clients.objectives.layer_selection.search import SEARCHES
from fedloom.clients.training.loss import LOSSES, USUAL, loss_section
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.schedules import SCHEDULES, schedule_section
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import DEFAULTS, facts_of
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.shorthand import fields_of, is_listed
from fedloom.conf.sites import SiteConfig, parse_entries
from fedloom.conf.typed import PLAIN, value_of
from fedloom.conf.values import default_of
from fedloom.server.strategies.base import STRATEGIES

DEFAULT = "default"  # the value of an option whose default is not known
SECTIONS: Mapping[str, Registry[Any]] = {
    "network": NETWORKS, "objective": OBJECTIVES, "strategy": STRATEGIES,
    "training.optimizer": OPTIMIZERS, "training.schedule": SCHEDULES, "training.loss": LOSSES,
}  # fmt: skip
PARTS: Mapping[str, Registry[Any]] = {
    "of": NETWORKS, "head": NETWORKS, "learner": BASE_LEARNERS, "search": SEARCHES, "auxiliary": AUXILIARY,
}  # fmt: skip


def values_of(config: Config, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Return all values of a configuration by dotted keys, with defaults, in the type that each key declares.

    Lists and free tables are values. `metrics`: names of the run's metrics, which show its usual loss.
    Raises UserError for a section that is neither a name nor a table.
    """
    chosen = {
        "training.optimizer": optimizer_section(config.training),
        "training.schedule": schedule_section(config.training),
        "training.loss": loss_section(config.training) if config.training.loss else {"name": usual_loss(config, metrics)},
    }
    return dict(_walk(config, "", chosen))


def _walk(instance: Any, above: str, chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(instance):
        key, value = f"{above}{field.name}", getattr(instance, field.name)
        if key in SECTIONS:
            yield from _flat(filled(SECTIONS[key], chosen.get(key, value)), f"{key}.")
        elif dataclasses.is_dataclass(value):
            yield from _walk(value, f"{key}.", chosen)
        elif key in ("sites", "population"):
            yield key, [_entry(each) for each in parse_entries(value)] if isinstance(value, list) else value
        elif key == "training.augment":
            yield key, [_named(_even(each)) for each in value]
        else:
            yield key, _even(value)


def filled(registry: Registry[Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section {name: ..., options} with the defaults of a shipped class, and each option in its type."""
    name = section.get("name", "")
    schemas: list[type] = [registry.get(name)] if isinstance(name, str) and registry.shipped(name) else []
    schemas += [WeightOptions] if registry is NETWORKS and name else []
    known = {key: _option(schema, field, section) for schema in schemas for key, field in fields_of(schema).items()
             if is_listed(field)}  # fmt: skip
    return {"name": name, **known, **{key: _even(item) for key, item in section.items() if key not in {"name", *known}}}


def _option(schema: type, field: dataclasses.Field[Any], section: Mapping[str, Any]) -> Any:
    """Return the value of a shipped class's option: a plain value, or a dataclass for a section of its own."""
    if field.name in section:
        try:
            value = value_of(schema, field.name, section[field.name])
        except UserError:  # of another version, or edited: compared as written
            return _even(section[field.name])
    else:
        value = default_of(field)
    registry = PARTS.get(field.name)
    if registry and isinstance(value, list):
        return [filled(registry, each) if isinstance(each, Mapping) else each for each in value]
    if registry and isinstance(value, Mapping) and value:
        return filled(registry, value)
    return value if (get_args(field.type) or (field.type,))[0] in PLAIN or dataclasses.is_dataclass(value) else _even(value)


def _flat(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section by dotted keys. Only sections of known options are opened."""
    for key, value in section.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _flat(
                {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, f"{above}{key}."
            )
        elif isinstance(value, Mapping) and key in PARTS and "name" in value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _entry(spec: SiteConfig) -> dict[str, Any]:
    """Return an entry of `sites` without the values that are defaults."""
    changed = _changed(spec)
    if spec.network:
        changed["network"] = _brief(spec.network)
    if spec.networks:
        changed["networks"] = [_brief(network) for network in spec.networks]
    if (partition := _changed(spec.partition)) or "partition" in changed:
        changed["partition"] = {"name": spec.partition.name, **partition}
    return changed


def _changed(instance: Any) -> dict[str, Any]:
    given = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    usual = vars(type(instance)())
    return {key: value for key, value in given.items() if value != usual[key] and not dataclasses.is_dataclass(value)}


def _brief(network: Mapping[str, Any]) -> Any:
    """Return a site's network without the options that are at their defaults."""
    full, usual = filled(NETWORKS, network), filled(NETWORKS, {"name": network.get("name")})
    return {key: value for key, value in full.items() if key == "name" or value != usual.get(key, DEFAULT)}


def _named(entry: Any) -> Any:
    return entry["name"] if isinstance(entry, Mapping) and [*entry] == ["name"] else entry


def _even(value: Any) -> Any:
    """Return a value whose type is not declared, with whole numbers as int: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _even(item) for key, item in value.items()}
    return [_even(item) for item in value] if isinstance(value, list | tuple) else value


def usual_loss(config: Config, metrics: Sequence[str]) -> str:
    """Return the name of the loss of a run without training.loss, by its metrics; "default" if they leave it open."""
    usual = {kind for kind, names in DEFAULTS.items() if names[0] == metrics[0]} if metrics else set()
    if config.evaluation.metrics or not usual:
        kinds = [set(facts_of(name).kinds) for name in metrics if facts_of(name).kinds]
        usual = set.intersection(*kinds) if kinds else set()
    losses = {USUAL[kind] for kind in usual if kind in USUAL}
    return losses.pop() if len(losses) == 1 else DEFAULT


def unset_options(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return, for the values of each run, the options that it lacks and that another run sets for the same class.

    Only classes from elsewhere can lack options: their defaults are not known.
    """
    options: dict[tuple[str, str], dict[str, None]] = {}
    for values in runs:
        for section, name in _classes(values):
            options.setdefault((section, name), {}).update(dict.fromkeys(_inside(values, section)))
    return [[key for each in _classes(values) for key in options[each] if key not in values] for values in runs]


def _classes(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(section, str(values.get(f"{section}.name"))) for section in SECTIONS]


def _inside(values: Mapping[str, Any], section: str) -> Iterable[str]:
    return (key for key in values if key.startswith(f"{section}."))


def naming_key(values: Mapping[str, Any], key: str) -> str:
    """Return the key of the name that decides whether the section of `key` has this option; without one, `key`."""
    above = key.removesuffix(".name")
    while above := above.rpartition(".")[0]:
        if f"{above}.name" in values:
            return f"{above}.name"
    return key
