"""A network as it is evaluated on a domain: its outputs for the domain, BatchNorm's statistics, and the targets' unit."""

from torch import Tensor, nn

from fedloom.clients.data.standardise import Standardisation
from fedloom.conf.errors import UserError
from fedloom.fusion.state import BATCH_NORM

MIN_BATCH = 2  # images of a batch with a variance
BATCH = "batch"  # evaluation.statistics: BatchNorm uses each batch's mean and variance


class HeadView(nn.Module):
    """The `outputs` of a network: inputs to [n, outputs], or [n, steps, outputs].

    With statistics=BATCH, BatchNorm uses the batch's mean and variance in evaluation mode too. The batch should then be a
    large random draw of the domain. The running statistics stay unchanged. `standardisation`: inputs and outputs are in the
    data's own units, and those of the network are standardised.
    """

    def __init__(
        self, network: nn.Module, outputs: slice, statistics: str, standardisation: Standardisation | None = None
    ) -> None:
        super().__init__()
        self.network, self.outputs, self.standardisation = network, outputs, standardisation
        norms = [module for module in network.modules() if isinstance(module, BATCH_NORM)]
        self._norms = [norm for norm in norms if norm.running_mean is not None] if statistics == BATCH else []

    def forward(self, inputs: Tensor) -> Tensor:
        if self._norms and not self.training and len(inputs) < MIN_BATCH:
            raise UserError(
                f"evaluation.statistics={BATCH}: needs at least {MIN_BATCH} images of a domain, got {len(inputs)}"
            )
        if self.standardisation is None:
            return self.network(inputs)[..., self.outputs]
        outputs = self.network(self.standardisation.of_inputs(inputs))[..., self.outputs]
        return self.standardisation.predictions(outputs)

    def train(self, mode: bool = True) -> "HeadView":
        """Set training mode, or evaluation mode with the configured statistics."""
        super().train(mode)
        for norm in self._norms:
            norm.training, norm.track_running_stats = True, mode
        return self
