"""Which contributions a configuration hides, what cannot be combined with that, and what a summary says about it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.clients.protocol.packing import NONE
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.server.ledger.declared import Slot, Sum


def check_hidden(config: Config) -> None:
    """Raise UserError for settings of privacy, packing, partial sums and clipping that exclude each other."""
    federation = config.federation
    if bool(config.privacy.noise) != bool(config.privacy.clip):
        raise UserError("privacy: set both privacy.clip and privacy.noise, or neither")
    if federation.secure_aggregation and federation.partial_sums:
        raise UserError("federation.partial_sums: workers would read the contributions; switch it or secure_aggregation off")
    if federation.secure_aggregation and federation.packed != NONE:
        raise UserError("federation.packed: secure_aggregation sends everything as 64-bit integers; leave it at none")
    for key in ("partial_sums", "secure_aggregation"):
        if getattr(federation, key) and federation.clip_change:
            raise UserError(f"federation.clip_change: the server scales each reply itself; leave federation.{key} off "
                            "(privacy.clip: sites scale what they send)")  # fmt: skip


def masked(config: Config, slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Return the slots, marked as masked for secure aggregation. Raises UserError unless all are unweighted sums."""
    if unfit := next((name for name, slot in slots.items() if not isinstance(slot, Sum) or slot.weighted), ""):
        kind = "counts by samples" if isinstance(slots[unfit], Sum) else "is not summed"
        raise UserError(f"federation.secure_aggregation: slot '{unfit}' of strategy '{config.strategy.get('name')}' {kind}; "
                        "choose one that gathers only unweighted sums, such as sum_aggregation")  # fmt: skip
    return {name: replace(slot, masked=True) for name, slot in slots.items() if isinstance(slot, Sum)}


def refuse_hidden(config: Config) -> None:
    """Raise UserError if the configuration hides contributions, because this strategy reads every site's reply."""
    for section, key in (("federation", "secure_aggregation"), ("privacy", "noise")):
        if getattr(getattr(config, section), key):
            raise UserError(f"{section}.{key}: strategy '{config.strategy['name']}' reads every site's reply; choose "
                            "one that gathers only sums, such as sum_aggregation")  # fmt: skip


def hidden(config: Config) -> dict[str, Any]:
    """Return the settings that hide contributions, by name, for the summary; empty if they are not hidden."""
    masks = {"secure_aggregation": True} if config.federation.secure_aggregation else {}
    noise = {key: getattr(config.privacy, key) for key in ("clip", "noise", "delta")} if config.privacy.noise else {}
    return {**masks, **noise}
