"""Questions to sites: an order for each, made when it is sent; what sites lack is sent to them, and they are asked again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord

from fedloom.clients.data import class_things, site_sizes
from fedloom.clients.protocol.messages import (
    ENROL,
    LOST,
    UNKNOWN,
    config_digest,
    text_record,
)
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.conf import to_json
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.rounds.channel import ClientChannel, RawReply
from fedloom.server.rounds.client_metadata import ClientMetadata
from fedloom.server.rounds.context import Content
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.task_messages import TaskMessages
from fedloom.server.run.listener import Listener

STATE, CONFIGURATION = "its own state", "the configuration"  # what a site may lack


@dataclass
class TaskDispatcher:
    """What travels to the sites of one run. `run` identifies the run to their stores; `rounds` is its length.

    `back`: the round to which the run has gone back: no site's store is there any more.
    """

    config: Config
    run: str
    federation: ClientChannel
    aggregation: ServerState
    listener: Listener
    rounds: int
    back: int = -1
    digest: str = field(init=False)
    text: ArrayRecord = field(init=False)
    _has: set[str] = field(default_factory=set)  # sites that have the configuration
    _roll: ClientMetadata = field(default_factory=ClientMetadata)  # of sites whose data the server has not
    _told: set[tuple[str, str]] = field(default_factory=set)  # of which sites the user has heard what

    def __post_init__(self) -> None:
        text = to_json(self.config)
        self.digest, self.text = config_digest(text), text_record(text)

    def ask(
        self, kind: str, number: int, site_round: int, sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None = None, split: str = "", trained: Collection[str] = (), attempt: str = "",
        draw: int = 0,
    ) -> Iterator[RawReply]:  # fmt: skip
        """All sites' replies; those that lost their own state, or lack the configuration, are asked again with it."""
        question = TaskMessages(self, kind, number, site_round, content, expected or {}, split, trained, attempt, draw)
        tried: dict[str, set[str]] = {}  # what each site lacked, and was sent
        asked = [(site, False) for site in sites]
        while asked:
            again: list[tuple[Site, bool]] = []
            for reply in self._exchange(question, asked):
                lack = _lack(reply)
                mine = tried.setdefault(reply.site.name, set())
                if not lack:
                    yield reply
                elif reason := f"it lost {lack} again" if lack in mine else self._refused(reply.site, number, lack):
                    yield RawReply(reply.site, None, reason)
                else:
                    mine.add(lack)
                    again.append((reply.site, STATE in mine))
            asked = again

    def bounds(self, site: Site) -> Bounds:
        """How large what the site sends may be. ReplyError if it did not enrol: nobody knows then."""
        if self._has_data:
            return Bounds.of(self.config.federation, self.samples(site))
        return replace(Bounds.of(self.config.federation, self._roll.images(site.name)), counted=self.samples(site))

    def samples(self, site: Site) -> int:
        """How many training images of the site count: by the configuration, or as the site says if the server has no data.

        Then federation.most_samples limits them, or else what the other sites say. ReplyError if it has not said so.
        """
        if self._has_data:
            return site_sizes(self.config)[site.index]
        said, most = self._roll.images(site.name), self.config.federation.most_samples
        counted = min(said, most) if most else self._roll.counted(site.name)
        if counted < said and (site.name, "size") not in self._told:
            self._told.add((site.name, "size"))
            self.listener.message(f"{site.name} says that it has {said} images, many more than the others; {counted} count "
                                  "(federation.most_samples sets another limit)")  # fmt: skip
        return counted

    def enrol(self, sites: Sequence[Site]) -> list[Site]:
        """Where the server has no data: hear from sites that have not said so how many images they have; those that fit."""
        self._hear(sites)
        return self.fitting(sites)

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """The names of their classes, by the configuration, or where the server has no data as the sites say."""
        if self._has_data:
            return {site.name: class_things(site.spec) for site in sites}
        self._hear(sites)
        asked = {site.name for site in sites}
        return {site: names for site, names in self._roll.names().items() if site in asked}

    def enrolled_names(self, sites: Sequence[Site]) -> list[tuple[str, ...]]:
        """What sites that enrolled call their classes, of those that fit; nobody is asked."""
        said, unlike = self._roll.class_names(), self._roll.unlike() if self.config.data.heads == "shared" else {}
        return [said[site.name] for site in sites if site.name in said and site.name not in unlike]

    def _hear(self, sites: Sequence[Site]) -> None:
        new = [site for site in sites if not (self._has_data or self._roll.has(site.name))]
        for reply in self.ask(ENROL, 1, 1, new, {}):
            self._roll.take(reply)

    def fitting(self, sites: Sequence[Site]) -> list[Site]:
        """The sites that fit. Where all share their outputs, one whose classes bear other names than at most of the sites
        that enrolled does not: what it learns of a class would be taken for another one.
        """
        unlike = self._roll.unlike() if self.config.data.heads == "shared" else {}
        for site in sites:
            if site.name in unlike and (site.name, "unlike") not in self._told:
                self.listener.message(f"{site.name} is not asked: {unlike[site.name]}, and data.heads=shared")
                self._told.add((site.name, "unlike"))
        return [site for site in sites if site.name not in unlike]

    @property
    def _has_data(self) -> bool:
        return self.federation.simulated or has_data(self.config)

    def needs_configuration(self, site: Site) -> bool:
        """Whether the configuration goes with the site's order. In a simulation always: engines carry it once per worker."""
        return self.federation.simulated or site.name not in self._has

    def _exchange(self, question: TaskMessages, asked: Sequence[tuple[Site, bool]]) -> Iterator[RawReply]:
        orders = ((site, question.order(site, lost)) for site, lost in asked)
        for reply in self.federation.ask(question.kind, orders, question.site_round, self.config.federation.timeout):
            if reply.content is not None and UNKNOWN not in reply.content.config_records:
                self._has.add(reply.site.name)
            yield reply

    def _refused(self, site: Site, number: int, lack: str) -> str:
        """Why a site that lacks something is not asked again with it; empty if it is, which is told of lost states."""
        if lack == CONFIGURATION:
            self._has.discard(site.name)
            return ""
        base = self.aggregation.slots.base(site.name)
        if base and self.config.federation.secure_aggregation:
            return "its own state is lost, and under masks nobody else has it; forget it, then readmit it"
        told = f"{site.name}: its own state is lost: that after round {base}"
        begins = "its contribution" if self.aggregation.restart(site) is not None else "the beginning"
        if base < 1:
            return "it says that its own state is lost, and needs none"
        if self.config.federation.lost_store == "stop" and base > self.back:
            raise UserError(f"round {number}: {told}; federation.lost_store=restart begins at {begins}")
        if not self.federation.enrolment.owns(site.name):
            return f"its own state is lost; {self._stranger(site.name)}"
        self.listener.message(f"round {number}: {told}; it begins again at {begins}")
        return ""

    def _stranger(self, site: str) -> str:
        """Why a node that took a site's place is not sent what the site gave, and how to mend it."""
        enrolment, run = self.federation.enrolment, f"{self.config.run.root}/{self.config.run.name}"
        node, owner = enrolment.nodes.get(site), enrolment.bindings.bound().get(site)
        claims = ", ".join(map(str, enrolment.claims(site)))
        return (f"node {node} is not sent what node {owner} gave ('fedloom readmit {run} {site} --node ID' says which one "
                f"is the site now, of those that claim it: {claims})")  # fmt: skip


def _lack(reply: RawReply) -> str:
    """What the site says that it lacks; empty if nothing."""
    records = reply.content.config_records if reply.content is not None else {}
    return CONFIGURATION if UNKNOWN in records else STATE if LOST in records else ""
