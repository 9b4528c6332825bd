"""A round, and how its questions reach the sites."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flwr.app import RecordDict

from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.clients.protocol.signatures import SIGNED, fingerprint, update_payload, verified_signature
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.randomness import generator
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, SumOverflowError
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import Participation, Restoration
from fedloom.server.rounds.view import Setup, View

Content = Mapping[str, State] | Callable[[Site], Mapping[str, State]]  # states by record name, for all sites or each


class UnorderedError(FailedError):
    """A sum overflowed, and which site is refused depended on the order of arrival. The round begins again, in order."""


class Round(View):
    """One round: its number and sites, and the facts from the sites' replies."""

    def __init__(
        self, setup: Setup, slots: Slots, participation: Participation, number: int, transport: "Transport"
    ) -> None:
        super().__init__(setup, slots)
        self.clipped: dict[str, dict[str, float]] = {}  # by site and record: the size of changes that were scaled back
        self.participants, self.site_round, self.number = participation.sites, participation.round, number
        self._transport = transport
        self.losses: dict[str, float] = {}  # of the sites that report them
        self.replies = 0  # from sites that have trained
        self.epsilon: dict[str, float] = {}  # each site's privacy cost so far, as it reports
        self.signed: dict[str, dict[str, str]] = {}  # the sites' signatures of what they sent
        self.trained: set[str] = set()  # sites that have trained in this round
        self.attempt = ""  # the current attempt of secure aggregation
        self.again = 0  # which draw of the round's batches, for secure aggregation
        self.masked: list[str] = []  # the sites whose masked contributions count
        self.leaving: list[str] = []  # sites to be forgotten: the others remove the masks that they share with them
        self.restoration: Restoration | None = None  # the restoration to which the round belongs
        self.recalibrated = False  # no site trained: they sent statistics of the aggregates
        self.record: dict[str, Any] = {}  # the round's line in metrics.jsonl, once it is committed

    def rng(self, purpose: str) -> np.random.Generator:
        """Return a NumPy generator for this round and purpose. It is the same whenever the round is repeated."""
        return generator(self.config.seed, purpose, str(self.number))

    @property
    def length(self) -> int:
        """How many rounds the sites' learning-rate schedule assumes."""
        return self._transport.length

    def images(self, site: Site) -> int:
        """Return how many of a site's training examples count, from the configuration or its report; 0 if unknown."""
        return self._transport.images(site)

    def most_samples(self, site: Site) -> int:
        """Return the largest number of samples that a site may report; 0: any."""
        return self._transport.bounds(site).most_samples

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """Return, by site, what its classes 0, 1, ... stand for, by the configuration or its report; empty if unknown."""
        return self._transport.class_names(sites)

    def message(self, text: str) -> None:
        """Show the user a message."""
        self._transport.message(text)

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return self.ledger.keys()

    def keep_signature(self, site: str, content: RecordDict) -> None:
        """Keep the site's signature of its reply for the round's record. Ignore an invalid one, or one by another key."""
        if SIGNED not in content.config_records:
            return
        payload = update_payload(self._transport.run, site, self.site_round, content)
        signed = verified_signature(content, *payload)
        if signed and fingerprint(signed["key"]) == self._keys.get(site):
            self.signed[site] = {"sha256": str(payload[-1]), **signed}

    def count_training(self, site: str, numbers: Mapping[str, float]) -> None:
        """Count a site as trained in this round, with its loss and privacy cost if `numbers` has them."""
        if "loss" in numbers:
            self.losses[site] = numbers["loss"]
        self.replies += 1
        self.trained.add(site)
        if self.config.privacy.noise and "epsilon" in numbers:
            self.epsilon[site] = numbers["epsilon"]

    def reason(self, site: Site, error: Exception) -> str:
        """Return why a reply is dropped. Raises UnorderedError if the round begins again instead."""
        if isinstance(error, SumOverflowError):
            self._transport.overflowed(site, error)
        return str(error)


class Gathering(Protocol):
    """A question whose replies are added up without being read (server.rounds.secure_aggregation)."""

    def gather(self, kind: str, content: Content, asked: Sequence[Site]) -> dict[str, State]:
        """Send the sites the question `kind` with `content`; return the means over the replies, by record name."""
        ...

    def total(self, kind: str, asked: Sequence[Site], needed: Sequence[str]) -> tuple[State, list[str]]:
        """Send the sites the question `kind`; return the sum of the answers' one record, and the sites of the sum."""
        ...


class Adding(Protocol):
    """Adds up the partial sums that workers send instead of single replies (server.rounds.partial_sums)."""

    def add(self, partial: PartialSum, reply: ClientUpdate) -> None:
        """Add the partial sum that contains a site's reply, unless it is added already. Raises ReplyError."""
        ...

    def fetched(self) -> Iterator[tuple[ClientUpdate, str]]:
        """Fetch and add the sums that nodes store; yield each reply in them, with the reason why it is dropped, or ''."""
        ...


class Transport:
    """How questions reach the sites of a run. This one is that outside of rounds, where no site can be asked.

    Attributes:
        run: The run's id in the sites' stores.
        length: The number of rounds for the sites.
    """

    run: str
    length: int

    def __init__(self) -> None:
        self.run, self.length = "", 0

    def ask(
        self, kind: str, context: "Round", sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:  # fmt: skip
        """Ask sites a question, and yield the replies.

        Args:
            kind: TRAIN, or the name of a question.
            context: The round.
            sites: The sites to ask.
            content: The records for all sites, or a function from a site to its records.
            expected: The records that workers may add up on the way; None: none.

        Yields:
            Every site's reply, or the reason for its absence.
        """
        raise UserError(f"'{kind}': sites can only be asked in a round")

    def masked(self, context: "Round", expected: Mapping[str, RecordSpec]) -> Gathering:
        """Return a question for secure aggregation, whose replies are added up without being read."""
        raise UserError("sites can only be asked in a round")

    def partials(self, context: "Round", means: dict[str, ExactSum], expected: Mapping[str, RecordSpec]) -> Adding:
        """Return the object that adds workers' partial sums to `means` and to the slots."""
        raise UserError("sites can only be asked in a round")

    def bounds(self, site: Site) -> Bounds:
        """Return the limits that are enforced on what the site sends."""
        return Bounds()

    def images(self, site: Site) -> int:
        """Return how many of the site's training examples count; 0 if unknown."""
        return 0

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """Return, by enrolled site, what its classes 0, 1, ... stand for; empty if unknown."""
        return {}

    def replied(self, site: Site, reason: str) -> None:
        """Report a site's reply. `reason`: why it is dropped; "" if it counts."""

    def message(self, text: str) -> None:
        """Show the user a message."""

    def overflowed(self, site: Site, error: SumOverflowError) -> None:
        """Raise UnorderedError if the round can begin again with the replies in order, since the site's does not fit."""

    def enough(self, kind: str, context: "Round", replies: int) -> None:
        """Raise TooFewRepliesError if `replies` good replies are too few for a question of this kind."""
