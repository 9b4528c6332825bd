"""The sites' half that goes with a strategy, where a configuration or a command line names the strategy alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.clients.objectives import OBJECTIVES
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.server.strategies.base import STRATEGIES, Strategy, check_named


def with_default_objective(config: Config, overrides: Sequence[str] = ()) -> Config:
    """The configuration with both halves: without an objective, with the one that the strategy goes with.

    So, too, where `overrides` (key=value) name a strategy and no objective, and that of the experiment is another method's:
    its options and its modes (baselines) go with it. UserError for an option that is the other half's.
    """
    check_named(config)
    strategy = _strategy(config)
    own, given = strategy.default_objective, config.objective.get("name")
    keys = {word.partition("=")[0] for word in overrides}
    alone = bool({"strategy", "strategy.name"} & keys) and not {"objective", "objective.name"} & keys
    if own and not given:
        config = dataclasses.replace(config, objective={"name": own, **strategy.objective_defaults, **config.objective})
    elif own and alone and not issubclass(OBJECTIVES.get(str(given), "objective"), OBJECTIVES.get(own)):
        named = {key: option for key, option in config.objective.items() if f"objective.{key}" in keys}
        baselines = config.baselines if "baselines" in keys else []
        config = dataclasses.replace(
            config, objective={"name": own, **strategy.objective_defaults, **named}, baselines=baselines
        )
    _check_half(config, "objective", "strategy")
    return config


def _strategy(config: Config) -> Strategy:
    try:
        return STRATEGIES.build(config.strategy, "strategy")
    except UserError:
        if "name" in config.strategy:
            _check_half(config, "strategy", "objective")
        raise


def _check_half(config: Config, here: str, there: str) -> None:
    """UserError for an option of the section `here` that is none there, but one of the section `there`."""
    sections: dict[str, Mapping[str, Any]] = {"strategy": config.strategy, "objective": config.objective}
    known = {"strategy": _fields(STRATEGIES, config.strategy.get("name"))}
    default_objective = getattr(STRATEGIES.find(config.strategy["name"], "strategy"), "default_objective", "")
    known["objective"] = _fields(OBJECTIVES, config.objective.get("name") or default_objective)
    whose = {"objective": "the sites'", "strategy": "the server's"}[there]
    for key in sections[here]:
        if key != "name" and key not in known[here] and key in known[there]:
            raise UserError(f"{here}.{key}: is an option of {whose} half of the method; say {there}.{key}")


def _fields(registry: Any, name: Any) -> set[str]:
    """The options of what a name stands for; none of what is not ours to know."""
    found = registry.find(name) if name else None
    return {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
