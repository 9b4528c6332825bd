"""List the keys of a configuration, with their values, defaults and meanings, and the options of named components."""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.networks import NETWORKS
from fedloom.clients.networks.base import WEIGHT_OPTIONS
from fedloom.clients.networks.start import WeightOptions
from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.training.checks import check_handed_on
from fedloom.clients.training.loss import LOSSES, loss_section
from fedloom.clients.training.loss import WHERE as LOSS
from fedloom.clients.training.optimizers import OPTIMIZERS, SGD, optimizer_of
from fedloom.clients.training.schedules import SCHEDULES, schedule_of
from fedloom.conf.errors import UserError, nearest, unknown
from fedloom.conf.loading import to_yaml
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.shorthand import fields_of, is_listed
from fedloom.conf.sites import SiteConfig
from fedloom.conf.suggestions import by_word
from fedloom.conf.values import default_of, takes
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.strategies import STRATEGIES
from fedloom.sims.report.tables import Table
from fedloom.sims.tracking import TRACKERS

NAMED: Mapping[str, Registry[Any]] = {
    "network": NETWORKS, "objective": OBJECTIVES, "strategy": STRATEGIES,
    "training.optimizer": OPTIMIZERS, "training.schedule": SCHEDULES,
    "training.loss": LOSSES,
    "tracking": TRACKERS,
}  # fmt: skip
SHOWN = ("network", "objective", "strategy")  # shown with all their options
COLUMNS = ["key", "takes", "default", "meaning"]


def with_options(config: Config) -> str:
    """Return the configuration as YAML, with all options of networks, objectives and strategies filled in.

    Raises UserError for a name or an option that `fedloom run` refuses.
    """
    sections = {name: _filled(NAMED[name], getattr(config, name), name) for name in SHOWN}
    _check_training(config)
    if has_data(config):
        metrics_of(config)
    return to_yaml(dataclasses.replace(config, **sections))


def _check_training(config: Config) -> None:
    """Raise UserError for a wrong loss, schedule or optimiser."""
    LOSSES.build(loss_section(config.training), LOSS)
    schedule_of(config.training)
    if not isinstance(optimizer_of(config.training), SGD):
        check_handed_on(config.training)


def _filled(registry: Registry[Any], section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a section with all options of its class. A function or module from outside has no further ones."""
    if not section:
        return {}
    common = {key: section[key] for key in WEIGHT_OPTIONS if key in section} if where == "network" else {}
    own = {key: value for key, value in section.items() if key not in common}
    made = registry.build(own, where)
    known = dataclasses.asdict(made) if registry.has_fields(str(section["name"])) else own  # type: ignore[call-overload]
    return {"name": section["name"], **known, **common}


def table(section: str = "") -> Table:
    """Return the keys of a section (`training`, `strategy.cla_ot`, `sites.partition`), or one key (`rounds`), as a table.

    `section`: empty for the sections of the whole configuration. Raises UserError for an unknown section or key.
    """
    section = ".".join(part for part in section.split(".") if not part.isdigit())  # sites.0.samples
    above, _, key = section.rpartition(".")
    if not section or section in NAMED:
        return _section_table(section)
    if above in NAMED and key not in NAMED[above].names() and ":" not in key:
        return _of_components(section, NAMED[above], key)
    try:
        rows = [row for row in _section_table(above).rows if len(row) == len(COLUMNS) and row[1] != "a section"]
    except UserError:
        rows = []
    if key in (keys := [str(row[0]) for row in rows]):
        return Table(section, COLUMNS, [row for row in rows if row[0] == key])
    try:
        return _section_table(section)
    except UserError:
        if above and nearest(key, keys):
            raise unknown("key", section, [f"{above}.{each}" for each in keys]) from None
        raise


def _of_components(section: str, registry: Registry[Any], key: str) -> Table:
    """Return an option, with a row for each component that has it. Raises UserError if none has it."""
    schemas = {name: registry.get(name) for name in registry.names() if registry.shipped(name)}
    rows = {f"{name}.{row[0]}": row for name, schema in schemas.items() for row in _rows(schema)}
    if registry is NETWORKS:
        rows |= {row[0]: row for row in _rows(WeightOptions)}
    found = [[name, *row[1:]] for name, row in rows.items() if row[0] == key]
    if not found:
        names = registry.names()
        if not nearest(key, names, 0.6) and nearest(key, options := [row[0] for row in rows.values()]):
            raise unknown("option", section, [f"{section.rpartition('.')[0]}.{each}" for each in {*options}])
        raise unknown(registry.kind, key, names)
    return Table(section, COLUMNS, found)


def _section_table(section: str) -> Table:
    if above := next((name for name in NAMED if f"{section}.".startswith(f"{name}.")), ""):
        return _named(section, NAMED[above], section.removeprefix(above).removeprefix("."))
    schema: Any = Config
    for index, part in enumerate(parts := section.split(".") if section else []):
        schema = _inside(schema, part, ".".join(parts[: index + 1]))
    return Table(section, COLUMNS, list(_rows(schema)), _deeper(section, schema))


def _deeper(section: str, schema: Any) -> str:
    """Return a note that names the keys with keys or options below them."""
    above = f"{section}." if section else ""
    inner = [field.name for field in fields_of(schema).values() if _section(field) or above + field.name in NAMED]
    return f"fedloom options KEY lists more of {', '.join(above + name for name in inner)}" if inner else ""


def _named(section: str, registry: Registry[Any], rest: str) -> Table:
    """Return the names in a registry, or the options of one of them, as a table."""
    if not rest:
        note = f"fedloom options {section}.NAME lists its options"
        note += f"; all have {' and '.join(WEIGHT_OPTIONS)}" if registry is NETWORKS else ""
        return Table(section, ["name", "what it is"], [[name, _about(registry, name)] for name in registry.names()], note)
    if ":" in rest:  # the user's, or of another package
        common = _rows(WeightOptions) if registry is NETWORKS else ()
        return Table(section, COLUMNS, [*_parameters(registry.find(rest)), *common])
    name, *parts = rest.split(".")
    schema = registry.get(name)
    for index, part in enumerate(parts):
        schema = _inside(schema, part, section.removesuffix(".".join(parts)) + ".".join(parts[: index + 1]))
    return Table(section, COLUMNS, [*_rows(schema), *(_rows(WeightOptions) if registry is NETWORKS and not parts else ())])


def _parameters(component: Any) -> Iterator[list[str]]:
    """Yield a row for each parameter of a class or function from outside."""
    if dataclasses.is_dataclass(component):
        yield from _rows(component)
        return
    for parameter in inspect.signature(component).parameters.values():
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        yield [
            parameter.name,
            "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation),
            default,
            "",
        ]


def _about(registry: Registry[Any], name: str) -> str:
    if not registry.shipped(name):
        return "from an installed package"
    return " ".join((registry.find(name).__doc__ or "").partition("\n\n")[0].split())


def _section(field: dataclasses.Field[Any]) -> Any:
    """Return the dataclass of a field that is a section or a list of sections; None for other fields."""
    if field.name == "sites" and field.type is not int:  # a tracker's field of this name is a number
        return SiteConfig
    entry = next(iter(get_args(field.type)), None) if get_origin(field.type) is list else field.type
    return entry if dataclasses.is_dataclass(entry) else None


def _inside(schema: Any, part: str, where: str) -> Any:
    sections = {field.name: inner for field in fields_of(schema).values() if (inner := _section(field))}
    above = (*SHOWN, "tracking") if schema is Config else ()
    if part not in sections and not (sections or above):
        raise UserError(f"{where}: is not a section; 'fedloom options {where.rpartition('.')[0]}' lists the keys above it")
    if part not in (*sections, *above) and part in fields_of(schema):
        parent = " ".join(filter(None, ("fedloom options", where.rpartition(".")[0])))
        raise UserError(f"{where}: is a key, not a section; '{parent}' lists it")
    if part not in sections and schema is Config and (near := by_word(part)) not in {"", part}:
        lists = near if near in NAMED else near.rpartition(".")[0].replace(".0", "") or near
        raise UserError(f"unknown section '{part}'; did you mean '{near}'? 'fedloom options {lists}' lists it")
    if part not in sections:
        raise unknown("section", where, {*sections, *above, *(fields_of(schema) if schema is Config else ())})
    return sections[part]


def _rows(schema: Any) -> Iterator[list[str]]:
    for field in fields_of(schema).values():
        if not is_listed(field):
            continue
        if _section(field):
            yield [field.name, "a section", "", str(field.metadata.get("help", ""))]
            continue
        default = "" if _required(field) else json.dumps(default_of(field), default=str)
        yield [field.name, takes(field), default, str(field.metadata.get("help", ""))]


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING
