"""Single layers: the identity, a layer's tensors, and whether two layers have the same design."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError


def identity(name: str, module: nn.Module, width: int) -> Tensor:
    """Return the weight [width, width, ...] with which a layer like `module` is the identity.

    Raise UserError if such a layer cannot be the identity.
    """
    if type(module) is nn.Linear:
        return torch.eye(width)
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or not _keeps_size(module):
        raise UserError(
            f"layer '{name}' cannot be added as an identity: it must be a plain convolution that preserves the size"
        )
    weight = torch.zeros(width, width, *module.kernel_size)
    weight[:, :, *(size // 2 for size in module.kernel_size)] = torch.eye(width)
    return weight


def _keeps_size(module: nn.Conv1d | nn.Conv2d) -> bool:
    """Return whether outputs are as large as inputs, and every output can depend on every input channel."""
    reach = tuple(d * (k // 2) for k, d in zip(module.kernel_size, module.dilation, strict=True))
    odd = all(k % 2 for k in module.kernel_size)
    plain = type(module) in (nn.Conv1d, nn.Conv2d) and module.groups == 1 and not any(step > 1 for step in module.stride)
    return plain and odd and module.padding == reach


def check_design(name: str, goal: nn.Module, other: str, have: nn.Module) -> None:
    """Raise UserError if two layers have different types or options."""
    wanted, existing = ({key: tuple(t.shape[2:]) for key, t in tensors_of(each).items()} for each in (goal, have))
    options = ("stride", "padding", "dilation", "num_groups")
    same = all(getattr(goal, option, None) == getattr(have, option, None) for option in options)
    if type(goal) is not type(have) or wanted != existing or not same:
        raise UserError(f"layer '{other}' ({type(have).__name__}: {', '.join(existing)}) does not fit '{name}' "
                        f"({type(goal).__name__}: {', '.join(wanted)}): the networks have different designs")  # fmt: skip


def with_bias(layer: nn.Linear) -> dict[str, Tensor]:
    """Return a linear layer's weight and bias by name; the bias is zeros if it has none."""
    weight = layer.weight.detach()
    return {"weight": weight, "bias": weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers by name, without those of its submodules."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    return {name: tensor.detach() for name, tensor in own.items()}


def other_design(names: Sequence[str], layers: Sequence[int], uses: Sequence[int]) -> UserError:
    """Return the error for two matched units with other numbers of layers, or whose layers run other numbers of times."""
    if uses[0] != uses[1]:
        first, second = (f"{number} time{'s' * (number != 1)}" for number in uses)
        shared = f"'{names[0]}' runs {first} in one network, and '{names[1]}' {second} in the other"
        return UserError(f"{shared}; take networks that run a shared module equally often, or give each run its own layers")
    return UserError(f"'{names[0]}' ({layers[0]} layers) and '{names[1]}' ({layers[1]}) have different designs")
