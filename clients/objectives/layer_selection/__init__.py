"""Layer selection: which layers a site shares is learned (LASEM)."""

from fedloom.clients.objectives.layer_selection.learners import BASE_LEARNERS, BaseLearner
from fedloom.clients.objectives.layer_selection.objective import LayerSelection

__all__ = ["BASE_LEARNERS", "BaseLearner", "LayerSelection"]
