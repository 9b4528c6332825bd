"""`fedloom networks`: where a network can be cut."""

import pytest

from fedloom.clients.networks import NETWORKS
from tests.sims.commands import Command, refused


def test_points_are_listed_with_their_features(fedloom: Command) -> None:
    said = fedloom("networks", "resnet20:width=0.5", "--channels", 1, "--size", 16)
    assert said.code == 0, said.err
    assert "resnet20:width=0.5 on images of 1 x 16 x 16" in said.out
    rows = [line for line in said.out.splitlines() if line.startswith("| stage2 ")]
    assert rows == ["| stage2 | 16 x 8 x 8 | 1024 |"]
    assert "network={name: split, of: {name: resnet20, width: 0.5}, at: POINT}" in said.out


@pytest.mark.parametrize("name", ["torchvision:resnet18", "torchvision.models:resnet18"])
def test_torchvisions_are_cut_too(fedloom: Command, name: str) -> None:
    said = fedloom("networks", name, "--size", 32)
    assert said.code == 0, said.err
    assert "| layer2 | 128 x 4 x 4 | 2048 |" in said.out
    assert "of: {name: 'torchvision.models:resnet18'}" in said.out


def test_without_a_name_the_networks_are_listed(fedloom: Command) -> None:
    assert {*NETWORKS.names()} <= set(fedloom("networks").out.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet21"], "unknown network 'resnet21'; did you mean"),
        (["torchvision:resnet19"], "did you mean 'resnet18'"),
        (["conv6:foo=1"], "network.foo"),
        (["exits"], "cannot be cut"),
        (["torchvision:alexnet", "--size", "8"], "fails on"),
    ],
)
def test_what_cannot_be_cut_is_one_line(fedloom: Command, words: list[str], message: str) -> None:
    refused(fedloom("networks", *words), message)
