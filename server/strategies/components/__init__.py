"""Methods whose sites keep networks of their own and share parts of them; how well the parts of all fit together."""

from fedloom.server.strategies.components.fedgh import FedGH
from fedloom.server.strategies.components.head_transfer import HeadTransfer
from fedloom.server.strategies.components.partial import PartialAveraging

__all__ = ["FedGH", "HeadTransfer", "PartialAveraging"]
