"""What the package offers by its own name."""

import importlib

import fedloom


def test_every_public_name_is_what_its_module_defines():
    assert sorted(fedloom.__all__) == sorted(fedloom._MODULES) and set(fedloom.__all__) <= set(dir(fedloom))
    for name, module in fedloom._MODULES.items():
        assert getattr(fedloom, name) is getattr(importlib.import_module(module), name), name


def test_a_name_that_is_missing_is_an_attribute_error():
    assert not hasattr(fedloom, "nothing")
