"""Networks with exits: which blocks stand before each classifier, prefixes of one another, the mean of all answers."""

import re

import pytest
import torch
from torch import Tensor

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, initialise
from fedloom.clients.networks.exits import ExitNetwork
from fedloom.conf.errors import UserError


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def built(of: dict, after: tuple[int, ...] = (), depth: int = 0, channels: int = 3) -> ExitNetwork:
    network = NETWORKS.build({"name": "exits", "of": of, "after": list(after), "depth": depth}, "network").empty(
        Form.images(channels, 16, 7)
    )
    assert isinstance(network, ExitNetwork)
    initialise(network, torch.Generator().manual_seed(0))
    return network.eval()


def images(channels: int = 3) -> Tensor:
    return torch.randn(4, channels, 16, 16, generator=torch.Generator().manual_seed(1))


FAMILIES = [
    ({"name": "mlp", "widths": [9, 8, 7]}, (), 3),
    ({"name": "mlp", "widths": [9, 8, 7]}, (1, 3), 2),
    ({"name": "resnet18", "width": 0.125}, (2, 4, 6, 8), 4),
    ({"name": "resnet10", "width": 0.125, "norm": "none"}, (), 4),
    ({"name": "wide_resnet", "depth": 10, "widen": 1}, (), 3),
    ({"name": "lenet"}, (), 4),
    ({"name": "conv6", "width": 0.5, "norm": "batch"}, (2, 6), 2),
]


@pytest.mark.parametrize(("of", "after", "exits"), FAMILIES)
def test_it_answers_with_the_mean_of_its_classifiers(of, after, exits):
    network = built(of, after)
    with torch.inference_mode():
        each, mean = network(images(), each=True), network(images())
    assert each.shape == (exits, 4, 7)
    torch.testing.assert_close(mean, each.mean(0))


@pytest.mark.parametrize(("of", "after", "exits"), FAMILIES)
def test_a_network_of_less_depth_is_a_prefix(of, after, exits):
    whole = built(of, after)
    state = whole.state_dict()
    for depth in range(1, exits + 1):
        part = built(of, after, depth)
        part.load_state_dict({name: state[name] for name in part.state_dict()})
        with torch.inference_mode():
            torch.testing.assert_close(part(images(), each=True), whole(images(), each=True)[:depth])


def test_an_exit_at_the_end_alone_is_the_network_itself():
    of = {"name": "resnet10", "width": 0.125}
    plain = NETWORKS.build(of, "network").empty(Form.images(3, 16, 7)).eval()
    network = built(of, (4,))
    state = dict(zip(plain.state_dict(), network.state_dict().values(), strict=True))
    plain.load_state_dict(state)
    with torch.inference_mode():
        torch.testing.assert_close(plain(images()), network(images()))


@pytest.mark.parametrize(("options", "message"), [
    ({"after": [2, 1]}, "network.after: got [2, 1], takes rising numbers of its blocks, from 1 to 3"),
    ({"after": [1, 4]}, "network.after: got [1, 4], takes rising numbers of its blocks"),
    ({"after": [1, 2], "depth": 3}, "network.depth: got 3, takes at most 2, the number of blocks in network.after"),
    ({"of": {"name": "mlp", "widths": []}}, "network.of: 'mlp' is not a chain of layers and blocks"),
    ({"of": {"name": "exits"}}, "network.of: 'exits' is not a chain of layers and blocks"),
    ({"of": {"name": "resnet181"}}, "unknown network 'resnet181'; did you mean 'resnet18'?"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        NETWORKS.build({"name": "exits", **options}, "network").empty(Form.images(3, 16, 7))
