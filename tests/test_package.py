"""What the package offers by its own name."""

import importlib
from importlib import metadata

import fedloom


def test_every_public_name_is_what_its_module_defines():
    assert sorted(fedloom.__all__) == sorted(fedloom._MODULES) and sorted(fedloom.__all__) == dir(fedloom)
    for name, module in fedloom._MODULES.items():
        assert getattr(fedloom, name) is getattr(importlib.import_module(module), name), name


def test_a_name_that_is_missing_is_an_attribute_error():
    assert not hasattr(fedloom, "nothing")
    assert fedloom.__version__ == metadata.version("fedloom")
