"""Net2DeeperNet (Chen et al. 2016): make a network as deep as another one, with the same function."""

from torch import Tensor, nn

from fedloom.fusion.cla_ot.balance import balanced
from fedloom.fusion.cla_ot.matching import match_evenly, wired


def deepened(network: nn.Module, deeper: nn.Module, probe: Tensor) -> nn.Module:
    """Return the network with as many layers as `deeper`, the same function and its own widths.

    Added layers are identities after a ReLU. Added residual blocks are zero, as in CLA+OT (Sec. 3.2), so no gradient
    reaches them: such a network trains like the shallower one. Layers are spread evenly; the first and the last stay
    in place.

    `probe`: inputs without labels, [k, ...]. Raise UserError if the networks have different families, or a layer
    cannot be added. The message has its name.
    """
    structure, wiring = wired([deeper, network], probe)
    return balanced(deeper, structure, network, wiring, match_evenly(structure, wiring)).network
