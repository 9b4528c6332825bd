"""What the package offers by its own name."""

import doctest
import subprocess
import sys

import pytest
import torch

import fedloom.fusion
from fedloom.conf.errors import UserError
from fedloom.fusion import FusionSettings, align, fuse
from fedloom.fusion.cla_ot.matching import optimal_alignment
from tests.fusion.parts import images, network

PROBE = images(8)


def test_the_example_of_the_package_runs():
    ran = doctest.testmod(fedloom.fusion)
    assert ran.attempted and not ran.failed


def test_what_sites_do_not_need_is_not_imported():
    heavy = ["ot", "fedloom.fusion.pipeline"]
    code = f"import sys, fedloom.fusion.exact, fedloom.clients.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(hasattr(fedloom.fusion, name) for name in fedloom.fusion.__all__)
    with pytest.raises(AttributeError, match="no attribute 'merge'"):
        _ = fedloom.fusion.merge


def test_layers_that_correspond_are_those_that_fusion_brings_together():
    deep, shallow = network("mlp:widths=[14,12,10,9]", 0), network("mlp:widths=[8,6]", 1)
    found = align(deep, shallow, probe=PROBE)
    assert [len(names) for names in found.layers] == [4, 2] and found.costs.shape == (4, 2)
    places = [found.layers[0].index(name) for name in found.pairs]
    assert tuple(places) == optimal_alignment(found.costs)
    assert list(found.pairs.values()) == list(found.layers[1])
    fused = fuse([deep, shallow], into=1, depth=0, probe=PROBE)
    assert fused.alignment[1] == tuple(places)
    assert fused.pairs[1] == found.pairs and fused.pairs[0] == {name: name for name in found.layers[0]}
    back = fuse([deep, shallow], into=1, depth=1, probe=PROBE)
    assert back.pairs[0] == align(shallow, deep, probe=PROBE).pairs and len(back.pairs[0]) == 2
    assert torch.isfinite(fused.network(PROBE)).all()


def test_a_comparison_by_neurons_and_one_that_is_unknown():
    deep, shallow = network("mlp:widths=[9,8,6]", 0), network("mlp:widths=[9,6]", 1)
    by_neurons = align(deep, shallow, probe=PROBE, settings=FusionSettings(comparison="neurons"))
    assert by_neurons.costs[2, 1] == 0 and by_neurons.costs[0, 1] == 9
    with pytest.raises(UserError, match="comparison"):
        FusionSettings(comparison="colour")
