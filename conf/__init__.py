"""Typed configuration: dataclasses, the YAML experiments in this folder, and the code that merges them."""

from fedloom.conf.errors import UserError
from fedloom.conf.load import experiment_names, from_json, load, to_json, to_yaml
from fedloom.conf.schema import Config

__all__ = ["Config", "UserError", "experiment_names", "from_json", "load", "to_json", "to_yaml"]
