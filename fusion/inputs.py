"""Prepare input networks: unwrap compiled ones, refuse those that cannot be fused."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.conf.errors import UserError

COMPILED, INNER = "OptimizedModule", "_orig_mod"  # the class that torch.compile makes, and its attribute with the original
QUANTISED = ("torch.ao.nn.quant", "torch.ao.nn.intrinsic", "torch.ao.nn.qat", "torch.ao.quantization", "torch.nn.quant")


def plain_networks(networks: Sequence[object]) -> list[nn.Module]:
    """Return the networks, without the wrappers of torch.compile.

    Raise UserError if a network cannot be fused. The message has its index and the reason.
    """
    plain = []
    for index, network in enumerate(networks):
        network = uncompiled(network)
        if not isinstance(network, nn.Module):
            raise UserError(f"network {index} is a {type(network).__name__}; use a torch.nn.Module (load a state into one)")
        if why := next(_unfit(network), ""):
            raise UserError(f"network {index} {why}")
        plain.append(network)
    return plain


def uncompiled(network: object) -> Any:
    """Return the network that torch.compile wrapped, or the argument if it is not compiled."""
    while type(network).__name__ == COMPILED and isinstance(network, nn.Module):
        network = getattr(network, INNER)
    return network


def _unfit(network: nn.Module) -> Iterator[str]:
    """Yield the reasons why a network cannot be traced or its tensors cannot be added."""
    for name, module in network.named_modules():
        where = f"'{name}'" if name else "itself"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"is TorchScript ({where}); pass the module that it was made from"
        if type(module).__name__ == COMPILED:
            yield f"is compiled in {where}; pass the original (its {INNER})"
        if type(module).__module__.startswith(QUANTISED):
            yield f"is quantised ({where} is a {type(module).__name__}); fuse first, then quantise the result"
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            yield f"stores more than tensors in '{name}' (get_extra_state), which cannot be fused; remove it"
        elif is_lazy(tensor):
            yield f"is lazy: '{name}' has no values yet; run it once on an input"
        elif tensor.is_meta:
            yield f"has no values in '{name}' (device meta); load its weights"
        elif tensor.is_quantized:
            yield f"is quantised ('{name}' is {tensor.dtype}); fuse first, then quantise the result"
        elif tensor.layout is not torch.strided:
            yield f"has a sparse tensor '{name}'; make it dense (to_dense)"
