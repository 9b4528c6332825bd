"""Which node is which site. A node says so itself; a name that is taken goes to another node only when its holder is gone.

What a site gave is bound to the node that first joined under its name: where Flower authenticates nodes, a node's id is that
of its key. Another node may train under a name whose holder is gone, but is never sent what the site gave before, unless
the operator says that it may (`fedloom readmit RUN SITE --node ID`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from clients.messages import PROTOCOL, QUERY, WHO
from conf.errors import UserError, plain
from conf.sites import Site

POLL_SECONDS = 0.2
REFRESH_SECONDS = 15.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0  # between questions to a node that says not who it is: doubled each time
ANSWER_SECONDS = 60.0  # after which a question is taken for lost
MOST_TOLD = 300  # characters of an error
PATIENCE_SECONDS = 1.0  # for a first answer, however short the time to join
REFUSED = "says so, too, and is refused: node {1} is {2}"
NOT_OWNER = ", though not the one that gave what is kept ('fedloom readmit RUN {2} --node ID' says which one is)"


@dataclass
class _Asked:
    """A node that has not said who it is: how often it failed, when it is asked again, the question that is out, if any."""

    failures: int = 0
    due: float = 0.0
    message: str = ""
    sent: float = 0.0

    def fail(self, now: float) -> None:
        """Ask again, later each time."""
        self.message, self.due = "", now + min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2**self.failures)
        self.failures += 1


@dataclass
class Enrolment:
    """The nodes of the sites. `bound`: reads which node each site's contributions belong to; `bind`: keeps that for good.

    `warnings` are for the user; whoever tells them takes them out.
    """

    grid: Grid
    sites: Sequence[Site]
    bound: Callable[[], Mapping[str, int]]
    bind: Callable[[Mapping[str, int]], None]
    nodes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    _claims: dict[str, list[int]] = field(default_factory=dict)  # by name, the nodes that say they are it, oldest first
    _known: set[int] = field(default_factory=set)  # nodes that have said who they are
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _told: set[tuple[str, int, int]] = field(default_factory=set)
    _failure: str = ""

    def __post_init__(self) -> None:
        self._by_place = {str(site.index): site.name for site in self.sites}
        self._names = {site.name for site in self.sites}

    def simulate(self) -> None:
        """Take the nodes of a simulation for the sites at their places, unasked: they are made from the configuration."""
        places = dict(enumerate(sorted(self.grid.get_node_ids())))
        self.nodes = {site.name: places[site.index] for site in self.sites}
        self._claims = {name: [node] for name, node in self.nodes.items()}
        self.present = self._known = set(places.values())
        self.bind(self.nodes)

    def join(self, timeout: float, fewest: int = 0) -> None:
        """Wait until every site is there, or for `timeout` seconds; `fewest` will do then (0: all must be there).

        Raises UserError naming those that are missing. A site that comes later takes part from then on.
        """
        begin = time.monotonic()
        while True:
            heard = self.poll()
            missing = [site.name for site in self.sites if site.name not in self.nodes]
            if not missing:
                return
            waited = time.monotonic() - begin
            if waited > timeout and (not self._waiting() or waited > PATIENCE_SECONDS):
                if fewest and len(self.nodes) >= fewest:
                    self.warnings.append(f"{len(missing)} sites are not there yet, such as {missing[0]}, and may come later")
                    return
                named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
                told = f"; last failure: {self._failure}" if self._failure else ""
                raise UserError(
                    f"{len(missing)} of {len(self.sites)} sites did not join within {timeout:g} s: {named} "
                    f"(start their nodes, or raise federation.join_timeout{told})"
                )
            if not heard:
                time.sleep(self._pause())

    def refresh(self, timeout: float = REFRESH_SECONDS) -> None:
        """Look for nodes that came or went; wait for answers only as long as a site has no node."""
        begin = time.monotonic()
        while True:
            heard = self.poll()
            absent = any(self.nodes.get(site.name) not in self.present for site in self.sites)
            if not (absent and self._waiting()) or time.monotonic() - begin > timeout:
                return
            if not heard:
                time.sleep(self._pause())

    def poll(self) -> bool:
        """Ask nodes that have not said who they are, and take the answers that are there; whether there were any."""
        self._look()
        now = time.monotonic()
        for asked in self._asked.values():
            if asked.message and now - asked.sent > ANSWER_SECONDS:
                asked.fail(now)
        due = sorted(node for node, asked in self._asked.items() if not asked.message and asked.due <= now)
        if due:
            ids = self.grid.push_messages([Message(RecordDict(), node, QUERY, group_id="who") for node in due])
            for node, message in zip(due, ids, strict=True):
                self._asked[node].message, self._asked[node].sent = message, now
        out = {asked.message: node for node, asked in self._asked.items() if asked.message}
        heard = False
        while out and (replies := list(self.grid.pull_messages(list(out)))):
            heard = True
            for reply in replies:
                if (node := out.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    self._hear(node, reply)
        self._assign()
        return heard

    def claims(self, site: str) -> list[int]:
        """The nodes that are there and say that they are the site."""
        return self._claims.get(site, [])

    def owns(self, site: str) -> bool:
        """Whether the site's node is the one that its contributions belong to."""
        return self.nodes.get(site) == self.bound().get(site)

    def _look(self) -> None:
        """Which nodes are there now. One that was gone is asked again: it may come back as another site."""
        self.present = set(self.grid.get_node_ids())
        self._known &= self.present
        self._claims = {name: [node for node in nodes if node in self.present] for name, nodes in self._claims.items()}
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.present}
        for node in self.present - self._known:
            self._asked.setdefault(node, _Asked())

    def _waiting(self) -> bool:
        """Whether a question is out that may well be answered."""
        now = time.monotonic()
        return any(asked.message and now - asked.sent < REFRESH_SECONDS for asked in self._asked.values())

    def _pause(self) -> float:
        return getattr(self.grid, "poll_seconds", POLL_SECONDS)

    def _hear(self, node: int, reply: Message) -> None:
        who = None if reply.has_error() else reply.content.config_records.get(WHO)
        if who is not None and who.get("protocol") != PROTOCOL:
            self._asked[node].fail(time.monotonic())
            self._failure = f"node {node} has another version of fedloom's messages; install the server's version there"
            return
        if who is None:
            self._asked[node].fail(time.monotonic())
            self._failure = (reason_of(reply) if reply.has_error() else "") or "a node did not say which site it is"
            return
        del self._asked[node]
        self._known.add(node)
        name = str(who["site"]) if "site" in who else self._by_place.get(str(who.get("partition-id")), "")
        if name in self._names:
            self._claims.setdefault(name, []).append(node)

    def _assign(self) -> None:
        """Each name to the node that it is bound to; else its holder keeps it; else to the oldest claim."""
        bound, new = self.bound(), {}
        for name, here in self._claims.items():
            holder = self.nodes.get(name)
            if (chosen := next((node for node in (bound.get(name), holder, *here) if node in here), None)) is None:
                continue
            self.nodes[name] = chosen
            if name not in bound:
                new[name] = chosen
            elif chosen not in (holder, bound[name]):
                self._warn(name, chosen, bound[name], "takes the place of node {1}, which is gone, and is not sent what "
                           "that gave ('fedloom readmit RUN {2} --node {0}' allows it)")  # fmt: skip
            for other in here:
                if other != chosen:
                    owner = chosen == bound.get(name, chosen)
                    self._warn(name, other, chosen, REFUSED if owner else REFUSED + NOT_OWNER)
        if new:
            self.bind(new)

    def _warn(self, name: str, node: int, other: int, text: str) -> None:
        if (name, node, other) not in self._told:
            self._told.add((name, node, other))
            self.warnings.append(f"{name}: node {node} {text.format(node, other, name)}")


def reason_of(reply: Message) -> str:
    """The text of an error in one line, the exception's kind first unless it is one made for users; or its code."""
    lines = [line for line in plain(reply.error.reason or "", lines=True).splitlines() if line.strip()]
    told = lines[-1:] if lines and lines[0].startswith("Traceback") else lines  # which names the exception at its end
    words = " ".join(" ".join(told).split()).removeprefix("conf.errors.UserError: ")
    return words[:MOST_TOLD] or f"error code {reply.error.code}"
