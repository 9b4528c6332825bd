"""YAML as text and back: by libyaml for long texts, ten times as fast; PyYAML's own reader tells errors better."""

from typing import Any

import yaml

LONG = 100_000  # characters


def read_yaml(text: str) -> Any:
    """What a text holds. Raises yaml.YAMLError, and RecursionError for one that is nested too deep."""
    if len(text) > LONG and hasattr(yaml, "CSafeLoader"):
        try:
            return yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            pass  # said again below
    return yaml.safe_load(text)


def write_yaml(tree: Any) -> str:
    """Plain values as text, keys in their order."""
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, allow_unicode=True)
