"""engine.compile: compute the loss of full batches with torch.compile, compiled once per process.

It agrees with the eager loss up to rounding. Smaller batches stay eager, since each shape would be compiled again.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.clients.training.loss import Loss as TaskLoss
from fedloom.conf.errors import UserError

Loss = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


@functools.lru_cache(maxsize=16)
def compiled_loss(network: nn.Module, start: int, stop: int, task_loss: TaskLoss, smoothing: float = 0.0) -> Loss:
    """Return the compiled loss over outputs start to stop, a function of weights, images [n, c, h, w] and labels [n].

    It raises UserError where torch.compile fails, for example without a C++ compiler.
    """

    from torch._dynamo.exc import TorchDynamoException  # imports the compiler

    def loss(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return task_loss.value(functional_call(network, weights, (images,))[..., start:stop], labels, smoothing)

    fast = torch.compile(loss, dynamic=False)

    def guarded(weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        try:
            return fast(dict(weights), images, labels)
        except TorchDynamoException as error:
            first = next(iter(str(error).splitlines()), "")
            raise UserError(
                f"engine.compile: torch.compile failed ({first}). Install a C++ compiler such as g++, or set it to false."
            ) from error

    return guarded
