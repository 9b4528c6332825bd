"""Secure aggregation at the site: what leaves it is masked, and only the sum over many sites can be read.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Sec. 4 (the protocol with
double masking, Fig. 4), over the integers modulo 2**64 in which the server's sums are exact.
"""

from typing import TYPE_CHECKING

from fedloom.clients.privacy.secure_aggregation.agreement import confirm, unmask
from fedloom.clients.privacy.secure_aggregation.contribution import bounded, masked, noise_share
from fedloom.clients.privacy.secure_aggregation.opening import Ready, ready
from fedloom.clients.privacy.secure_aggregation.site import keys, shares
from fedloom.clients.protocol.messages import SECURE_CONFIRM, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedloom.clients.job import Job
    from fedloom.clients.objectives import Answer

ANSWERS: "dict[str, Callable[[Job], Answer]]" = {
    SECURE_KEYS: keys,
    SECURE_SHARES: shares,
    SECURE_CONFIRM: confirm,
    SECURE_UNMASK: unmask,
}

__all__ = ["ANSWERS", "Ready", "bounded", "masked", "noise_share", "ready"]
