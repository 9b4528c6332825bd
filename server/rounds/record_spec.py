"""What a method expects of a site's reply, and a reply that meets it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots


def _nothing(record: State) -> None:
    """Check nothing."""


@dataclass(frozen=True)
class RecordSpec:
    """What one record of a reply must be, and where `RoundContext.gather` puts it.

    Args:
        like: tensors with the expected names, shapes and types; None: what the site put into `slot`.
        slot: the slot that the record goes into.
        mean: whether the record enters a mean over the replies: ONCE, or as often as the site has SAMPLES.
        bounded: `like` is what the site started from, and federation.largest_change limits the distance from it. Otherwise
            `like` is only a shape.
        whole: whether the record must have all tensors of `like`.
        integers: whether the record is int64 in units of 2**-bits already, so that nothing is rounded.
        check: raises ReplyError for an impossible record; called with finite numbers only.
        first: if `like` is None, returns what a site starts from that has put nothing into `slot` yet, by its name.
    """

    like: Mapping[str, Tensor] | None = None
    slot: str = ""
    mean: str = ""
    bounded: bool = True
    whole: bool = True
    integers: bool = False
    check: Callable[[State], None] = _nothing
    first: Callable[[str], State] | None = None

    def __repr__(self) -> str:
        like = "None" if self.like is None else f"{len(self.like)} tensors"
        return f"RecordSpec(like={like}, slot={self.slot!r}, mean={self.mean!r})"

    @property
    def summable(self) -> bool:
        """Whether a worker can check the record as the server does, and add it up: whole floats, for a slot or a mean."""
        floats = self.like is None or all(tensor.dtype.is_floating_point for tensor in self.like.values())
        simple = self.whole and self.bounded and not self.integers and self.check is _nothing
        return simple and floats and not (self.slot and self.mean)

    def start(self, slots: Slots, site: str) -> Mapping[str, Tensor]:
        """Return the tensors to compare the site's record with: `like`, its last contribution (floats), or `first`."""
        if self.like is not None:
            return self.like
        if self.first is not None and not slots.has(self.slot, site):
            return self.first(site)
        return slots.contributions.floats(site, self.slot)


@dataclass(frozen=True)
class ClientUpdate:
    """A site's checked reply: `records` has states by record name, `metrics` numbers by name."""

    site: Site
    records: Mapping[str, State]
    metrics: Mapping[str, float] = field(default_factory=dict)
    integers: Mapping[str, State] = field(default_factory=dict)  # the records in units of 2**-bits
    clipped: Mapping[str, float] = field(default_factory=dict)  # the size of changes that were scaled back, by record

    def __getitem__(self, record: str) -> State:
        return self.records[record]

    @property
    def samples(self) -> int:
        """How many images the site trained on."""
        return int(self.metrics.get("samples", 0))
