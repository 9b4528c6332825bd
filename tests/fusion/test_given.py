"""Networks as they are handed over: wrapped, compiled, lazy, quantised, of other types: it works, or a line says why not."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.conf.errors import UserError
from fedloom.fusion import align, fuse

PROBE = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def mlp(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def in_part(network: nn.Sequential) -> nn.Module:
    network[2] = torch.compile(network[2])  # type: ignore[assignment]
    return network


def in_place(network: nn.Module) -> nn.Module:
    network.compile()
    return network


def dynamic(network: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(network, {nn.Linear})


def scripted(network: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(network)


@pytest.mark.parametrize("wrap", [torch.compile, in_place, nn.DataParallel], ids=["compiled", "in place", "parallel"])
def test_wrapped_networks_are_fused_as_those_within(wrap: Callable[[nn.Module], Any]):
    plain = fuse([mlp(0), mlp(1)], into=0, probe=PROBE)
    found = fuse([wrap(mlp(0)), wrap(mlp(1))], into=0, probe=PROBE)
    for one, other in zip(plain.network.state_dict().values(), found.network.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert all(module._compiled_call_impl is None for module in found.network.modules())
    assert align(wrap(mlp(0)), wrap(mlp(1)), probe=PROBE).costs.shape == (2, 2)


@pytest.mark.parametrize("make, message", [
    (in_part, r"network 0 is compiled in '2'; pass the original"),
    (lambda _: nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(3)),
     r"network 0 is lazy: '0\.weight' has no values yet; run it once on an input"),
    (dynamic, r"network 0 is quantised \('0' is a Linear\); fuse first, then quantise the result"),
    (scripted, r"network 0 is TorchScript \(itself\); pass the module that it was made from"),
    (lambda network: copy.deepcopy(network).to("meta"), r"network 0 has no values in '0\.weight' \(device meta\); load its"),
    (lambda network: network.state_dict(), r"network 0 is a OrderedDict; use a torch\.nn\.Module"),
    (lambda _: None, r"network 0 is a NoneType; use a torch\.nn\.Module"),
])  # fmt: skip
def test_what_cannot_be_fused_says_what_to_do(make: Callable[[Any], Any], message: str):
    networks = [make(mlp(0)), mlp(1)]
    with pytest.raises(UserError, match=message):
        fuse(networks, into=1, probe=PROBE)
    with pytest.raises(UserError, match=message):
        align(*networks, probe=PROBE)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_default_type_of_tensors_does_not_matter(kind: torch.dtype):
    plain = fuse([mlp(0).to(kind), mlp(1).to(kind)], into=0, probe=PROBE.to(kind)).network.state_dict()
    networks = [mlp(0).to(kind), mlp(1).to(kind)]
    torch.set_default_dtype(torch.float64)
    try:
        found = fuse(networks, into=0, probe=PROBE.to(kind)).network.state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in found.items():
        assert tensor.dtype == kind and torch.allclose(tensor, plain[name], atol=1e-5)
