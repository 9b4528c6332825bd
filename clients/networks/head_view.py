"""A network as it is read on a domain: which outputs count, and with which statistics BatchNorm works."""

from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.state import BATCH_NORM

FEWEST = 2  # images in a batch that has a variance
BATCH = "batch"  # evaluation.statistics: BatchNorm takes each batch's own mean and variance


class HeadView(nn.Module):
    """The network's `outputs`: [n, c, h, w] images to [n, classes] logits.

    With statistics=BATCH, BatchNorm uses the batch's own mean and variance in evaluation mode too (the batch should then be
    a random draw of the domain, and not small); its running statistics stay as they are.
    """

    def __init__(self, network: nn.Module, outputs: slice, statistics: str) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs
        norms = [module for module in network.modules() if isinstance(module, BATCH_NORM)]
        self._norms = [norm for norm in norms if norm.running_mean is not None] if statistics == BATCH else []

    def forward(self, images: Tensor) -> Tensor:
        if self._norms and not self.training and len(images) < FEWEST:
            raise UserError(f"evaluation.statistics={BATCH}: takes at least {FEWEST} images of a domain, got {len(images)}")
        return self.network(images)[:, self.outputs]

    def train(self, mode: bool = True) -> "HeadView":
        """Training mode, or evaluation mode with the statistics that are asked for."""
        super().train(mode)
        for norm in self._norms:
            norm.training, norm.track_running_stats = True, mode
        return self
