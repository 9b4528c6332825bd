"""Fusion of networks and inputs that are out of the ordinary: large, small, silent, tied, without gradients; attention."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import apart

REFITS = ["plans", "regression", "selection"]
SILENT = [0, 276]  # of networks of which this probe set leaves channels silent that other inputs do not


def probe(samples: int = 50, seed: int = 9) -> Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))


def mlp(seed: int, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = [(8, 12), (12, 10), (10, 3)]
        layers = [layer for pair in sizes for layer in (nn.Linear(*pair, bias=bias), nn.ReLU())]
        return nn.Sequential(*layers[:-1]).eval()


class Encoder(nn.Module):
    """A transformer encoder over six tokens."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.into(tokens)).mean(1))


class Patches(nn.Module):
    """Patches by nn.Unfold."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.patches = nn.Unfold(4, stride=4, padding=padding)
        self.second, self.head = nn.Linear(6 * 16, 24), nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.patches(self.first(images).relu()).transpose(1, 2)).relu().mean(1))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.third.weight = self.second.weight
        self.head = nn.Linear(12, 3)

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(given).relu()).relu()).relu())


def scaled(network: nn.Sequential, factor: float) -> nn.Sequential:
    """The same function of other weights."""
    made: Any = copy.deepcopy(network)
    with torch.no_grad():
        made[0].weight.mul_(factor)
        made[0].bias.mul_(factor)
        made[2].weight.div_(factor)
    return made


@pytest.mark.parametrize("factor", [1e-8, 1e-3, 1e6, 1e12])
def test_the_scale_of_a_layer_does_not_matter(factor):
    like = fuse([mlp(0), mlp(1)], into=0, probe=probe()).network
    found = fuse([scaled(mlp(0), factor), scaled(mlp(1), factor)], into=0, probe=probe()).network
    assert apart(found, like, probe(64, 3)) < 1e-3


@pytest.mark.parametrize("seed", SILENT)
def test_channels_that_the_probe_set_leaves_silent_are_not_taken_for_each_other(seed):
    network, fresh = mlp(seed, bias=False), probe(2000, 3)
    with torch.no_grad():
        silent = (network[:4](probe()) == 0.0).all(0)
        assert int(silent.sum()) > 1 and bool((network[:4](fresh) > 0.0).any(0)[silent].any())
    wiring, twin = wire(network, fresh[:1]), mlp(seed, bias=False)
    twin.load_state_dict(wiring.permuted(network.state_dict(), wiring.permutations(torch.Generator().manual_seed(seed))))
    assert apart(fuse([network, twin], into=0, probe=probe()).network, network, fresh) < 1e-4


def test_a_class_that_a_network_does_not_know_is_no_answer_whatever_the_size_of_its_logits():
    one, other = mlp(0), mlp(1)
    shifted: Any = copy.deepcopy(other)
    with torch.no_grad():
        shifted[4].bias -= 100.0
    names = ["abc", "bcd"]
    like, found = (fuse([one, each], into=0, probe=probe(), classes=names).network for each in (other, shifted))
    torch.testing.assert_close(found(probe()).softmax(1), like(probe()).softmax(1), atol=1e-4, rtol=0.0)
    alone = fuse([one, shifted], into=0, probe=probe(), classes=names, weights=[0, 1]).network
    assert float(alone(probe()).softmax(1)[:, 0].max()) < 1e-6


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("given", [torch.zeros(20, 8), probe(1).expand(20, 8).clone()], ids=["zeros", "one input"])
def test_a_probe_set_that_tells_nothing_leaves_finite_weights(given, refit):
    made = fuse([mlp(0), mlp(1)], into=0, probe=given, settings=FusionSettings(refit=refit))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in made.network.state_dict().values())


def test_without_gradients():
    like = fuse([mlp(0), mlp(1)], into=0, probe=probe()).network
    with torch.inference_mode():
        found = fuse([mlp(0), mlp(1)], into=0, probe=probe()).network
    assert apart(found, like, probe()) == 0.0


def test_flags_of_the_result():
    one, other = mlp(0).train(), mlp(1).train()
    one[0].weight.requires_grad_(False)
    made = fuse([one, other], into=0, probe=probe()).network
    assert not made.training and one.training
    assert [name for name, weight in made.named_parameters() if not weight.requires_grad] == ["0.weight"]


def refused(expected: str, *networks: nn.Module, given: Any = None, **options: Any) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        fuse(networks, **{"into": 0, "probe": probe() if given is None else given, **options})


def test_what_cannot_be_fused_is_refused():
    refused("network 0: the layers 'second' and 'third' have one weight", Tied(), Tied())
    refused("network 0: tensor '0.weight' is torch.float16", mlp(0).half(), mlp(1).half(), given=probe().half())
    refused("too large for their type", scaled(mlp(0), 1e19), scaled(mlp(1), 1e19))
    refused("network 0 has no hidden layers", nn.ReLU(), mlp(1))
    refused("the probe set is a ndarray", mlp(0), mlp(1), given=probe().numpy())
    refused("into=1.0", mlp(0), mlp(1), into=1.0)


@pytest.mark.parametrize(("options", "message"), [
    ({"positions": 1.5}, "fusion positions: got 1.5, takes int"),
    ({"pin_first": "no"}, "fusion pin_first: got 'no', takes bool"),
    ({"width": "2"}, "fusion width: got '2', takes float"),
    ({"transport": "emd"}, "fusion transport: got 'emd', takes TransportSettings"),
])  # fmt: skip
def test_settings_of_another_type_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        FusionSettings(**options)


@pytest.mark.parametrize(("widths", "into", "width", "heads"), [
    ((48, 48), 0, 1.25, 5), ((48, 48), 0, 0.75, 3), ((64, 48), 0, 1.0, 4), ((64, 48), 1, 1.0, 4), ((64, 32), 0, 1.0, 4),
])  # fmt: skip
def test_heads_of_attention_keep_their_size_and_the_network_runs(widths, into, width, heads):
    tokens = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(0))
    networks = [Encoder(size).eval() for size in widths]
    made: Any = fuse(networks, into=into, depth=1 - into if width == 1.0 else into, probe=tokens,
                     settings=FusionSettings(width=width)).network  # fmt: skip
    attention = made.layers.layers[0].self_attn
    assert attention.num_heads == heads and attention.embed_dim == round(width * widths[into])
    with torch.no_grad():
        torch.testing.assert_close(made(tokens), made.train()(tokens), atol=1e-4, rtol=1e-4)


def test_widths_that_attention_cannot_have_are_refused():
    refused("use a width at which they agree", Encoder(48), Encoder(48), given=torch.randn(9, 6, 8),
            settings=FusionSettings(width=1.3))  # fmt: skip


def test_patches_by_unfold():
    network, images = Patches().eval(), torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    wiring, twin = wire(network, images[:1]), Patches().eval()
    orders = wiring.permutations(torch.Generator().manual_seed(1))
    assert sum(not torch.equal(order, torch.arange(len(order))) for order in orders.values()) == 2
    twin.load_state_dict(wiring.permuted(network.state_dict(), orders))
    assert apart(twin, network, images) < 1e-5
    with pytest.raises(UserError, match=r"Unfold with padding 2; use none; try F.pad before it"):
        wire(Patches(2), images[:1])
