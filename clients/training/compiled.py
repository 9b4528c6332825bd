"""engine.compile: the loss of a network's full batches through torch.compile, once in a process.

It agrees with the eager loss up to rounding. Smaller batches stay eager: each other shape would be compiled anew.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.training.loss import task_loss
from fedloom.conf.errors import UserError

Loss = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


@functools.lru_cache(maxsize=16)
def compiled_loss(network: nn.Module, start: int, stop: int, smoothing: float = 0.0) -> Loss:
    """The task's loss over outputs start to stop, at given weights by name, images [n, c, h, w] and labels [n].

    UserError where nothing can be compiled: torch.compile needs a C++ compiler.
    """

    from torch._dynamo.exc import TorchDynamoException  # imports the compiler

    def loss(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return task_loss(functional_call(network, weights, (images,))[:, start:stop], labels, smoothing)

    fast = torch.compile(loss, dynamic=False)

    def guarded(weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        try:
            return fast(dict(weights), images, labels)
        except TorchDynamoException as error:
            first = next(iter(str(error).splitlines()), "")
            raise UserError(
                f"engine.compile: torch.compile failed ({first}); it needs a C++ compiler such as g++, or set it to false"
            ) from error

    return guarded
