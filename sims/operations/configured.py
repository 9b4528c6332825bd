"""Build a run's configuration from the arguments of a command line."""

from collections.abc import Sequence

from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.server.strategies.defaults import configured as of_experiment


def configured(experiment: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of one run. For several values of a key, the UserError names `--seeds` or `--sweep`."""
    try:
        return of_experiment(experiment, overrides)
    except UserError as error:
        for key, _, values in (word.partition("=") for word in overrides):
            if key == "seeds":
                raise UserError(f"{key}: for one run per seed, use --seeds {plain(values) or '0,1,2'}") from None
            if "," in values and (str(error).startswith(f"{key}: got ") or f"'{values}'" in str(error)):
                raise UserError(f"{error}; for one run per value, use --sweep {plain(key)}={plain(values)}") from None
        raise
