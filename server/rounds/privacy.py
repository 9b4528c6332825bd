"""Which contributions a configuration hides, what cannot be combined with that, and what a summary says about it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.clients.data import site_sizes
from fedloom.clients.protocol.packing import NONE
from fedloom.clients.training.schedules import Schedule
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.schedules import sample_size

STEEP = 1 / 7  # of the largest rate: a change at this rate is small next to an earlier one (sketch.ALIKE)


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


def differs(config: Config) -> str:
    """Return why rounds of masked sums without noise have different sites, as key=value; empty if they have the same."""
    federation, sites = config.federation, len(config.roster)
    if not federation.secure_aggregation or config.privacy.noise:
        return ""
    if sample_size(config, sites) < sites:
        return f"federation.fraction={federation.fraction:g}"
    return f"federation.dropout={federation.dropout:g}" if federation.dropout else ""


def check_batches(config: Config) -> None:
    """Raise UserError if sites would refuse a later sum: a batch has all images, and rounds have different sites.

    Such a site contributes nearly the same in each round, so the difference of two sums reveals what others sent.
    """
    if not (why := differs(config)):
        return
    for site, size in zip(config.roster, site_sizes(config), strict=True):
        if config.training.batch >= size:
            most = f"training.batch to at most {size - 1}" if size > 1 else "more examples for this site"
            raise UserError(
                f"training.batch: got {config.training.batch}, but {site.name} has {size} training examples. With {why} and "
                "federation.secure_aggregation=true, it would refuse later sums: their difference from earlier sums would "
                f"reveal single contributions. Set {most}, or set privacy.noise, or let all sites participate in each round"
            )


def may_be_refused(config: Config, schedule: Schedule) -> list[str]:
    """Return a warning if stored masked contributions become small next to those that they replace."""
    rates = [schedule.rate(1.0, float(progress), config.rounds) for progress in range(config.rounds)]
    if not (why := differs(config)) or rates[-1] >= STEEP * max(rates):
        return []
    return [f"training.schedule: the rate of the last rounds is small. With {why} and federation.secure_aggregation=true, "
            "sites may refuse a late sum, and the run then stops: its difference from an earlier sum would reveal single "
            "contributions. To prevent this, set training.schedule=constant, or strategy.forgettable=false, or "
            "privacy.noise"]  # fmt: skip


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
