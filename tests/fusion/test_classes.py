"""Networks of different classes are fused by their names."""

import pytest
import torch
from torch import nn

from fedloom.conf.errors import UserError
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import apart, images, network, outputs

TEXT = "vgg11:width=0.125,norm=batch"
PROBE = images(40)


def mlp(classes: int, bias: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, classes, bias=bias)).double()


def test_another_order_of_the_same_classes_is_the_same_network():
    one = network(TEXT, classes=4)
    other = network(TEXT, classes=4)
    with torch.no_grad():
        for tensor in (other.get_parameter("head.weight"), other.get_parameter("head.bias")):
            tensor.copy_(tensor[[2, 0, 3, 1]])
    fused = fuse([one, other], into=0, probe=PROBE, classes=["abcd", "cadb"])
    assert fused.classes == ("a", "b", "c", "d") and apart(fused.network, one, PROBE) < 1e-6
    turned = fuse([one, other], into=1, probe=PROBE, classes=["abcd", "cadb"])
    assert turned.classes == ("c", "a", "d", "b") and apart(turned.network, other, PROBE) < 1e-6


@pytest.mark.parametrize("refit", ["none", "plans", "regression", "selection"])
def test_the_result_answers_for_all_classes(refit):
    one, other = network(TEXT, 0, classes=3), network(TEXT, 1, classes=4)
    fused = fuse([one, other], into=1, probe=PROBE, classes=[["cat", "dog", "owl"], ["dog", "bee", "ant", "cat"]],
                 settings=FusionSettings(refit=refit))  # fmt: skip
    assert fused.classes == ("dog", "bee", "ant", "cat", "owl")
    assert outputs(fused.network, PROBE).shape == (40, 5)


def test_all_weight_on_one_never_answers_what_it_does_not_know():
    one, other = network(TEXT, 0, classes=3), network(TEXT, 1, classes=3)
    fused = fuse([one, other], into=0, probe=PROBE, weights=[1, 0], classes=["abc", "cde"])
    found = outputs(fused.network, PROBE)
    torch.testing.assert_close(found[:, :3], outputs(one, PROBE), rtol=1e-5, atol=1e-5)
    assert bool((found[:, 3:].amax(dim=1) < found[:, :3].amax(dim=1)).all())


@pytest.mark.parametrize(("classes", "message"), [
    (None, "network 1 has 4 classes, the others 3; name them with classes="),
    (["abc"], "classes of 1 networks for 2"),
    (["abc", "abc"], "network 1: 3 class names, 3 different, for 4 outputs"),
    (["abb", "abcd"], "network 0: 3 class names, 2 different, for 3 outputs"),
])  # fmt: skip
def test_refused(classes, message):
    with pytest.raises(UserError, match=message):
        fuse([mlp(3), mlp(4)], into=0, probe=torch.randn(9, 6).double(), classes=classes)


def test_a_last_layer_without_bias_is_refused():
    with pytest.raises(UserError, match="network 0: its last layer needs a bias, so that it never answers 'd'"):
        fuse([mlp(3, False), mlp(4, False)], into=0, probe=torch.randn(9, 6).double(), classes=["abc", "abcd"])
