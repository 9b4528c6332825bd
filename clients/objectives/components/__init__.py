"""Compatible components (Gygli et al. 2021): extractors whose heads can be exchanged, and the methods that share parts."""

from fedloom.clients.objectives.components.auxiliary import AUXILIARY, Auxiliary
from fedloom.clients.objectives.components.objective import Components

__all__ = ["AUXILIARY", "Auxiliary", "Components"]
