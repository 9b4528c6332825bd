"""Copy networks with other tensors, also of other sizes."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.tracing import TRANSPOSED
from fedloom.fusion.graph.undisturbed import tensors_of


def with_state(
    network: nn.Module, state: Mapping[str, Tensor], without: Collection[str] = (), like: nn.Module | None = None
) -> nn.Module:
    """Return a copy of the network that holds the tensors of `state` themselves.

    `without`: names of norms that become identities. `like`: a network of the same structure, from which attention
    takes its number of heads. Raise UserError if attention cannot have tensors of these sizes.
    """
    replaced = {id(tensor): tensor for name, tensor in network.state_dict(keep_vars=True).items() if name in state}
    twin = copy.deepcopy(network, memo={**_looked_at(network), **replaced})  # these are not copied twice
    for module in twin.modules():
        module._compiled_call_impl = None  # of the original network (Module.compile)
    for name in without:
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, nn.Identity())
    for name, module in like.named_modules() if like is not None else ():
        if isinstance(module, nn.MultiheadAttention):
            vars(twin.get_submodule(name)).update(num_heads=module.num_heads, head_dim=module.head_dim)
    for key, tensor in state.items():
        parent, _, child = key.rpartition(".")
        module = twin.get_submodule(parent)
        if child in module._buffers:
            module._buffers[child] = tensor.detach()
        else:
            before = module._parameters.get(child)
            module.register_parameter(child, nn.Parameter(tensor.detach(), before is None or before.requires_grad))
        _fit(module)
    return twin


def _looked_at(network: nn.Module) -> dict[int, Tensor]:
    """Return detached copies of tensors in attributes whose autograd graph cannot be copied."""
    return {id(tensor): tensor.detach() for tensor in tensors_of(network) if not tensor.is_leaf}


def _fit(module: Any) -> None:
    """Set the sizes that a module stores as attributes."""
    weight = module._parameters.get("in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight")
    sizes = [SIZES[kind] for kind in SIZES if isinstance(module, kind)]
    if weight is not None and sizes:
        vars(module).update(sizes[0](module, tuple(weight.shape)))


def _of_convolution(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return sizes: groups keep their width if it fits the weight, otherwise their number."""
    if isinstance(module, TRANSPOSED):
        return {"in_channels": shape[0], "out_channels": shape[1] * module.groups}
    narrow = module.groups > 1 and shape[1] * module.groups == module.in_channels
    groups = shape[0] * module.groups // module.out_channels if narrow else module.groups
    return {"groups": groups, "out_channels": shape[0], "in_channels": shape[1] * groups}


def _of_norm(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"normalized_shape": shape}


def _of_attention(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return sizes: heads keep their width if it fits the weight, otherwise their number."""
    inner = shape[0] // 3
    if inner != shape[1]:
        raise UserError(f"attention over {shape[1]} channels has heads of {inner}: use a width at which they agree")
    heads = inner // module.head_dim if inner % module.head_dim == 0 else module.num_heads
    return {"embed_dim": shape[1], "kdim": shape[1], "vdim": shape[1], "num_heads": heads, "head_dim": inner // heads}


SIZES: dict[type[nn.Module], Callable[[Any, tuple[int, ...]], dict[str, Any]]] = {
    nn.modules.conv._ConvNd: _of_convolution,
    nn.Linear: lambda _, shape: {"out_features": shape[0], "in_features": shape[1]},
    nn.modules.batchnorm._NormBase: lambda _, shape: {"num_features": shape[0]},
    nn.GroupNorm: lambda _, shape: {"num_channels": shape[0]},
    nn.LayerNorm: _of_norm,
    nn.RMSNorm: _of_norm,
    nn.MultiheadAttention: _of_attention,
    nn.Embedding: lambda _, shape: {"num_embeddings": shape[0], "embedding_dim": shape[1]},
}
