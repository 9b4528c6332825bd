"""The objective that goes with a strategy, if a configuration or a command line names only the strategy."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.clients.objectives import OBJECTIVES, objective_of
from fedloom.conf.errors import UserError, say_dropped
from fedloom.conf.loading import is_shipped, load
from fedloom.conf.schema import Config
from fedloom.server.strategies.base import STRATEGIES, Strategy, check_named


def configured(experiment: str | os.PathLike[str], overrides: Sequence[str]) -> Config:
    """Return an experiment's configuration with these overrides, and with an objective that fits the strategy."""
    presets = [word for word in overrides if word.startswith("preset=")]
    named = any(word.startswith(("strategy=", "strategy.name=")) for word in overrides)
    shipped = load(experiment, presets) if named and is_shipped(experiment) else None
    return with_default_objective(load(experiment, overrides), overrides, shipped)


def with_default_objective(config: Config, overrides: Sequence[str] = (), shipped: Config | None = None) -> Config:
    """Return the configuration with an objective that fits the strategy.

    Without an objective, the strategy's default objective is used. The default also replaces an objective that does not
    fit, if `overrides` name a strategy but no objective. The replaced objective's options and baselines are then dropped.

    Args:
        config: The configuration.
        overrides: The `key=value` arguments of the command line.
        shipped: A shipped experiment. Its settings are not the user's, so no warning names those that are dropped.

    Raises:
        UserError: An option belongs to the other half of the method.
    """
    check_named(config)
    strategy = _strategy(config)
    default, name = strategy.default_objective, config.objective.get("name")
    keys = {word.partition("=")[0] for word in overrides}
    alone = bool({"strategy", "strategy.name"} & keys) and not {"objective", "objective.name"} & keys
    if default and not name:
        config = dataclasses.replace(config, objective={"name": default, **strategy.objective_defaults, **config.objective})
    elif default and alone and not issubclass(OBJECTIVES.get(str(name), "objective"), OBJECTIVES.get(default)):
        named = {key: option for key, option in config.objective.items() if f"objective.{key}" in keys}
        baselines = config.baselines if "baselines" in keys else []
        usual = shipped or Config()
        dropped = [f"objective.{key}" for key, option in config.objective.items() if key not in {"name", *named}
                   and usual.objective.get(key, config) != option]  # fmt: skip
        dropped += ["baselines"] if config.baselines not in (baselines, usual.baselines) else []
        if dropped:
            say_dropped("strategy.name", dropped)
        config = dataclasses.replace(
            config, objective={"name": default, **strategy.objective_defaults, **named}, baselines=baselines
        )
    _check_half(config, "objective", "strategy")
    return config


def mode_in_tables(config: Config) -> str:
    """Return the objective's mode, or what the strategy calls it in tables."""
    name, mode = config.strategy["name"], objective_of(config).mode
    return STRATEGIES.get(name).listed_as(mode) if STRATEGIES.shipped(name) else mode


def _strategy(config: Config) -> Strategy:
    try:
        return STRATEGIES.build(config.strategy, "strategy")
    except UserError:
        if "name" in config.strategy:
            _check_half(config, "strategy", "objective")
        raise


def _check_half(config: Config, here: str, there: str) -> None:
    """Raise UserError for an option in section `here` that is an option of section `there` only."""
    sections: dict[str, Mapping[str, Any]] = {"strategy": config.strategy, "objective": config.objective}
    known = {"strategy": _fields(STRATEGIES, config.strategy.get("name"))}
    default_objective = getattr(STRATEGIES.find(config.strategy["name"], "strategy"), "default_objective", "")
    known["objective"] = _fields(OBJECTIVES, config.objective.get("name") or default_objective)
    whose = {"objective": "the sites'", "strategy": "the server's"}[there]
    for key in sections[here]:
        if key != "name" and key not in known[here] and key in known[there]:
            raise UserError(f"{here}.{key}: is an option of {whose} half of the method; write {there}.{key}")


def _fields(registry: Any, name: Any) -> set[str]:
    """Return the option names of a registered class. Empty if the name is not ours, as for Flower's strategies."""
    cls = registry.find(name) if name else None
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
