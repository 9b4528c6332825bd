"""What a method expects of a site's reply, and a reply that holds it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots


@dataclass(frozen=True)
class RecordSpec:
    """What a record of a reply must be. `like`: names, shapes and kinds of number; None: of what the site put into `slot`.

    Where `RoundContext.gather` puts it: into a `slot`, or into a mean over the replies in which it counts ONCE or as often
    as the site has SAMPLES. `bounded`: `like` is what the site began from, and how far the record is from it is limited
    (federation.largest_change); else `like` is a shape alone. `whole`: it has all tensors of `like`. `check`: raises
    ReplyError for a record that cannot be true; it sees finite numbers only. `first`: where `like` is None, by the name of a
    site that has put nothing into `slot` yet, what it starts from.
    """

    like: Mapping[str, Tensor] | None = None
    slot: str = ""
    mean: str = ""
    bounded: bool = True
    whole: bool = True
    check: Callable[[State], None] = lambda record: None
    first: Callable[[str], State] | None = None

    def start(self, slots: Slots, site: str) -> Mapping[str, Tensor]:
        """What the site's record is like, as floats: `like`, what it put last, or what it starts from."""
        if self.like is not None:
            return self.like
        if self.first is not None and not slots.has(self.slot, site):
            return self.first(site)
        return slots.contributions.floats(site, self.slot)


@dataclass(frozen=True)
class ClientUpdate:
    """A reply that holds what was expected: states by record name, numbers by name."""

    site: Site
    records: Mapping[str, State]
    metrics: Mapping[str, float] = field(default_factory=dict)
    integers: Mapping[str, State] = field(default_factory=dict)  # the records in units of 2**-bits
    clipped: Mapping[str, float] = field(default_factory=dict)  # of records that were scaled back, how far they had moved

    def __getitem__(self, record: str) -> State:
        return self.records[record]

    @property
    def samples(self) -> int:
        """How many images the site trained on."""
        return int(self.metrics.get("samples", 0))
