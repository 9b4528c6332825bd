"""Which function answers which question of secure aggregation."""

from collections.abc import Callable

from fedloom.clients.job import Job
from fedloom.clients.objectives import Answer
from fedloom.clients.privacy.secure_aggregation.agreement import confirm, unmask
from fedloom.clients.privacy.secure_aggregation.site import keys, shares
from fedloom.clients.protocol.messages import SECURE_CONFIRM, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK

ANSWERS: dict[str, Callable[[Job], Answer]] = {
    SECURE_KEYS: keys,
    SECURE_SHARES: shares,
    SECURE_CONFIRM: confirm,
    SECURE_UNMASK: unmask,
}
