"""Networks as they are handed over: what is wrapped is taken out, what cannot be fused as it is says what to do."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.conf.errors import UserError

COMPILED, INNER = "OptimizedModule", "_orig_mod"  # what torch.compile gives, and what it was
QUANTISED = ("torch.ao.nn.quant", "torch.ao.nn.intrinsic", "torch.ao.nn.qat", "torch.ao.quantization", "torch.nn.quant")


def plain_networks(networks: Sequence[object]) -> list[nn.Module]:
    """The networks, compiled ones as they were before. UserError naming the first that cannot be worked on, and why."""
    found = []
    for place, given in enumerate(networks):
        given = uncompiled(given)
        if not isinstance(given, nn.Module):
            raise UserError(f"network {place} is a {type(given).__name__}, takes a torch.nn.Module (load a state into one)")
        if why := next(_unfit(given), ""):
            raise UserError(f"network {place} {why}")
        found.append(given)
    return found


def uncompiled(given: object) -> Any:
    """What torch.compile was given; anything else as it is."""
    while type(given).__name__ == COMPILED and isinstance(given, nn.Module):
        given = getattr(given, INNER)
    return given


def _unfit(network: nn.Module) -> Iterator[str]:
    """Why a network cannot be traced, or its numbers not be added."""
    for name, module in network.named_modules():
        where = f"'{name}'" if name else "itself"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"is TorchScript ({where}); give the module that it was made of"
        if type(module).__name__ == COMPILED:
            yield f"is compiled in {where}; give it as it was before (its {INNER})"
        if type(module).__module__.startswith(QUANTISED):
            yield f"is quantised ({where} is a {type(module).__name__}); fuse first, and quantise what comes out"
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            yield f"keeps more than tensors in '{name}' (get_extra_state), which cannot be fused; leave it out"
        elif is_lazy(tensor):
            yield f"is lazy: '{name}' has no values yet; run it once on an input"
        elif tensor.is_meta:
            yield f"has no values in '{name}' (device meta); load its weights"
        elif tensor.is_quantized:
            yield f"is quantised ('{name}' is {tensor.dtype}); fuse first, and quantise what comes out"
        elif tensor.layout is not torch.strided:
            yield f"has a sparse tensor '{name}'; make it dense (to_dense)"
