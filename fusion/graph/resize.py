"""Copies of networks that hold other tensors, of other sizes too."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fusion.graph.tracing import TRANSPOSED


def with_state(network: nn.Module, state: Mapping[str, Tensor], without: Collection[str] = ()) -> nn.Module:
    """A copy of the network that holds the tensors of `state` themselves; norms named in `without` become identities."""
    replaced = {id(tensor): tensor for name, tensor in network.state_dict(keep_vars=True).items() if name in state}
    twin = copy.deepcopy(network, memo=dict(replaced))  # these are not copied twice
    for name in without:
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, nn.Identity())
    for key, tensor in state.items():
        parent, _, child = key.rpartition(".")
        module = twin.get_submodule(parent)
        if child in module._buffers:
            module._buffers[child] = tensor.detach()
        else:
            module.register_parameter(child, nn.Parameter(tensor.detach()))
        _fit(module)
    return twin


def _fit(module: Any) -> None:
    """Set the sizes that a module keeps beside its weights."""
    weight = module._parameters.get("weight")
    sizes = [SIZES[kind] for kind in SIZES if isinstance(module, kind)]
    if weight is not None and sizes:
        vars(module).update(sizes[0](module, tuple(weight.shape)))


def _of_convolution(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Groups keep their width, if that is what the weight has, or their number."""
    if isinstance(module, TRANSPOSED):
        return {"in_channels": shape[0], "out_channels": shape[1] * module.groups}
    narrow = module.groups > 1 and shape[1] * module.groups == module.in_channels
    groups = shape[0] * module.groups // module.out_channels if narrow else module.groups
    return {"groups": groups, "out_channels": shape[0], "in_channels": shape[1] * groups}


def _of_norm(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"normalized_shape": shape}


SIZES: dict[type[nn.Module], Callable[[Any, tuple[int, ...]], dict[str, Any]]] = {
    nn.modules.conv._ConvNd: _of_convolution,
    nn.Linear: lambda _, shape: {"out_features": shape[0], "in_features": shape[1]},
    nn.modules.batchnorm._NormBase: lambda _, shape: {"num_features": shape[0]},
    nn.GroupNorm: lambda _, shape: {"num_channels": shape[0]},
    nn.LayerNorm: _of_norm,
    nn.RMSNorm: _of_norm,
    nn.Embedding: lambda _, shape: {"num_embeddings": shape[0], "embedding_dim": shape[1]},
}
