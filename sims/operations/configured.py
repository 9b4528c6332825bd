"""The configuration of a run, from the words of a command line."""

from collections.abc import Sequence

from fedloom.conf import load
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.server.strategies.defaults import with_default_objective


def configured(experiment: str, overrides: Sequence[str]) -> Config:
    """The configuration of a single run. UserError, which for several values says how each gets a run of its own."""
    try:
        return with_default_objective(load(experiment, overrides), overrides)
    except UserError as error:
        for key, _, values in (word.partition("=") for word in overrides):
            if key == "seeds":
                raise UserError(f"{key}: a run for each is made by --seeds {plain(values) or '0,1,2'}") from None
            if "," in values and (str(error).startswith(f"{key}: got ") or f"'{values}'" in str(error)):
                raise UserError(f"{error}; a run for each value: --sweep {plain(key)}={plain(values)}") from None
        raise
