"""Networks whose forward sets attributes: traces, fusions and alignments leave them as they were."""

import copy
import io
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion import align, fuse
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.settings import FusionSettings


class Watched(nn.Linear):
    """A layer, which is not traced into, that keeps what it saw."""

    def forward(self, input: Tensor) -> Tensor:
        self.saw = input
        return super().forward(input)


class Keeper(nn.Module):
    """Sets whatever a forward may set: tensors, shapes, counters; in lists, dictionaries and objects; in a submodule too."""

    def __init__(self, width: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.first = Watched(8, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth - 1)])
        self.inner = nn.Sequential(nn.ReLU())
        self.head = nn.Linear(width, 3)
        self.calls, self.features, self.history = 0, None, []
        self.known: dict[str, Any] = {"a": [1]}
        self.recent: deque[Any] = deque(maxlen=3)
        self.note = SimpleNamespace(last=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.layers:
            x = layer(x).relu()
        self.features, self.calls, self.new = x, self.calls + 1, x.shape
        self.history.append(x)
        self.known["a"].append(x)
        self.known["b"] = x
        self.recent.append(x)
        self.note.last = x
        self.inner[0].last = x  # type: ignore[assignment]
        self.mask = torch.ones(1)
        return self.head(self.inner(x) * self.mask)


def keeper(seed: int, **sizes: int) -> Keeper:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Keeper(**sizes).eval()


def inside(network: nn.Module) -> list[Any]:
    """Every module's attributes, with what is in them, in texts."""
    return [sorted((key, repr(vars(one) if isinstance(one, SimpleNamespace) else one)) for key, one in vars(module).items()
                   if not isinstance(one, Tensor) and key != "_parameters") for module in network.modules()]  # fmt: skip


def clean(network: nn.Module) -> None:
    text = repr(inside(network))
    assert "Proxy" not in text and "tensor(" not in text, text
    assert not any(hasattr(module, name) for module in network.modules() for name in ("saw", "new", "mask", "last"))
    torch.save(network, io.BytesIO())
    copy.deepcopy(network)


PROBE = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("refit", ["none", "plans", "regression", "selection"])
@pytest.mark.parametrize("depth", [2, 3])
def test_parents_and_result_of_a_fusion_are_as_before(refit: str, depth: int):
    networks = [keeper(0), keeper(1, width=10, depth=depth)]
    before = [inside(network) for network in networks]
    fused = fuse(networks, into=0, depth=1, probe=PROBE, settings=FusionSettings(refit=refit))  # type: ignore[arg-type]
    assert [inside(network) for network in networks] == before
    for network in [*networks, fused.network]:
        clean(network)


def test_an_alignment_and_classes_of_their_own_leave_nothing_behind():
    networks = [keeper(0), keeper(1)]
    align(networks[0], networks[1], probe=PROBE)
    fused = fuse(networks, into=0, probe=PROBE, classes=[["a", "b", "c"], ["b", "c", "d"]])
    for network in [*networks, fused.network]:
        clean(network)


class Odd(Keeper):
    """One that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def test_a_trace_that_fails_leaves_nothing_behind():
    network = Odd().eval()
    with pytest.raises(UserError, match="cannot be traced"):
        wire(network, PROBE[:1])
    clean(network)


def test_networks_that_were_used_before_are_fused_and_keep_what_they_had():
    networks = [keeper(0), keeper(1)]
    for network in networks:
        network(PROBE)
        network.features, network.known["only"] = None, [PROBE * network.head.weight.sum()]
    kept, calls = networks[0].features, networks[0].calls
    assert fuse(networks, into=0, probe=PROBE).network(PROBE).shape == (40, 3)
    assert networks[0].features is kept and networks[0].calls == calls and len(networks[0].history) == 1
