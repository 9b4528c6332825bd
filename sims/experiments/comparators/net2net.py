"""Net2DeeperNet (Chen et al. 2016): a network made as deep as another one, doing what it did before."""

from torch import Tensor, nn

from fedloom.fusion.cla_ot.balance import balanced
from fedloom.fusion.cla_ot.matching import match_evenly, wired


def deepened(network: nn.Module, deeper: nn.Module, probe: Tensor) -> nn.Module:
    """The network in the structure of `deeper`, with its own widths; probe: [k, ...] inputs, unlabelled.

    Added layers are identities behind ReLU; added residual blocks are zero, as in CLA+OT (Sec. 3.2), so that no gradient
    reaches them: such a network is trained as the shallower one is. Layers are spread evenly, the first and last in place.
    Raises UserError for networks of different families and where a layer cannot be added, naming it.
    """
    structure, wiring = wired([deeper, network], probe)
    return balanced(deeper, structure, network, wiring, match_evenly(structure, wiring)).network
