"""Which node is which site. A node says so itself; a name that is taken goes to another node only when its holder is gone.

What a site gave is bound to the node that first joined under its name. Where Flower authenticates nodes, the name belongs to
that node's key from then on, and a key that the operator registered under another name cannot claim it at all. Where it does
not, another node may train under a name whose holder is gone, but is never sent what the site gave before. In both cases the
operator may give the name to another node (`fedloom readmit RUN SITE --node ID`).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import PROTOCOL, QUERY, WHO
from fedloom.conf.errors import UserError, plain
from fedloom.conf.sites import Site
from fedloom.server.rounds.nodes import NONCE, Bindings, Node, nodes_of, nonce

POLL_SECONDS = 0.2
REFRESH_SECONDS = 15.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0  # between questions to a node that says not who it is: doubled each time
ANSWER_SECONDS = 60.0  # after which a question is taken for lost
MOST_TOLD = 300  # characters of an error
MOST_NAME = 100  # of a name that a node gives
MOST_NAMED = 5
PATIENCE_SECONDS = 1.0  # for a first answer, however short the time to join
REFUSED = "says so, too, and is refused: node {1} is {2}"
OTHER_NAME = "claims to be {2} and is refused: its key is registered as '{3}'"
OTHER_KEY = "has another key than {2} joined with and is refused ('fedloom readmit RUN {2} --node {0}' takes the new key)"
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
    """The nodes of the sites. `bindings`: which node and key each site's contributions belong to.

    `warnings` are for the user; whoever tells them takes them out.
    """

    grid: Grid
    sites: Sequence[Site]
    bindings: Bindings
    nodes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    present: dict[int, Node] = field(default_factory=dict)
    _claims: dict[str, list[int]] = field(default_factory=dict)  # by name, the nodes that say they are it, oldest first
    _known: set[int] = field(default_factory=set)  # nodes that have said who they are
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _told: set[tuple[str, int, int]] = field(default_factory=set)
    _failure: str = ""
    _others: dict[int, str] = field(default_factory=dict)  # nodes that are there as no site of these, and as what
    _named: set[str] = field(default_factory=set)  # of those, what the user has heard of

    def __post_init__(self) -> None:
        self._by_place = {str(site.index): site.name for site in self.sites}
        self._names = {site.name for site in self.sites}

    def simulate(self) -> None:
        """Take the nodes of a simulation for the sites at their places, unasked: they are made from the configuration."""
        places = dict(enumerate(sorted(self.grid.get_node_ids())))
        self.nodes = {site.name: places[site.index] for site in self.sites}
        self._claims = {name: [node] for name, node in self.nodes.items()}
        self.present = {node: Node(node) for node in places.values()}
        self._known = set(self.present)
        self.bindings.bind(self.nodes)

    def join(self, timeout: float, fewest: int = 0, unneeded: Collection[str] = ()) -> None:
        """Wait until every site is there but `unneeded` ones, or for `timeout` seconds; `fewest` will do then (0: all).

        Raises UserError naming those that are missing. A site that comes later takes part from then on.
        """
        begin = time.monotonic()
        while True:
            heard = self.poll()
            missing = [site.name for site in self.sites if site.name not in {*self.nodes, *unneeded}]
            if not missing:
                return self._tell_others()
            waited = time.monotonic() - begin
            if waited > timeout and (not self._waiting() or waited > PATIENCE_SECONDS):
                if fewest and len(self.nodes) >= fewest:
                    self.warnings.append(f"{len(missing)} sites are not there yet, such as {missing[0]}, and may come later")
                    return self._tell_others()
                named, told = _row(missing), f"; last failure: {self._failure}" if self._failure else ""
                others = _row(sorted(self._others.values()))
                told = f"; there, and no site that takes part: {others}{told}" if others else told
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
                return self._tell_others()
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
            questions = [Message(RecordDict({NONCE: nonce()}), node, QUERY, group_id="who") for node in due]
            for node, message in zip(due, self.grid.push_messages(questions), strict=True):
                self._asked[node].message, self._asked[node].sent = message, now
                if not message:  # the node is not registered any more
                    self._asked[node].fail(now)
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
        return self.nodes.get(site) == self.bindings.bound().get(site)

    def _look(self) -> None:
        """Which nodes are there now. One that was gone is asked again: it may come back as another site."""
        self.present = nodes_of(self.grid)
        self._known &= self.present.keys()
        self._others = {node: name for node, name in self._others.items() if node in self.present}
        self._claims = {name: [node for node in nodes if node in self.present] for name, nodes in self._claims.items()}
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.present}
        for node in self.present.keys() - self._known:
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
        registered = self.present[node].name if node in self.present else ""
        if name in self._names and registered in ("", name):
            self._claims.setdefault(name, []).append(node)
        elif name in self._names:
            self._warn(name, node, 0, OTHER_NAME, registered)
        else:
            self._others[node] = plain(name or str(who.get("site", f"partition-id {who.get('partition-id')}")))[:MOST_NAME]

    def _tell_others(self) -> None:
        """A line on nodes that are there and are not asked, once for each name."""
        if new := sorted({*self._others.values()} - self._named):
            self._named.update(new)
            self.warnings.append(f"there, but not asked, as no site that takes part in this run: {_row(new)}")

    def _assign(self) -> None:
        """Each name to the node that it is bound to; else its holder keeps it; else to the oldest claim."""
        bound, keys, new = self.bindings.bound(), self.bindings.keys(), dict[str, int]()
        for name, claims in self._claims.items():
            here = self._with_key(name, claims, keys.get(name, ""), bound)
            holder = self.nodes.get(name)
            if (chosen := next((node for node in (bound.get(name), holder, *here) if node in here), None)) is None:
                continue
            self.nodes[name] = chosen
            if bound.get(name) != chosen and keys.get(name):
                new[name] = chosen  # the same key, known to Flower as another node
            elif name not in bound or (chosen == bound[name] and name not in keys and self._key(chosen)):
                new[name] = chosen
            elif chosen not in (holder, bound[name]):
                self._warn(name, chosen, bound[name], "takes the place of node {1}, which is gone, and is not sent what "
                           "that gave ('fedloom readmit RUN {2} --node {0}' allows it)")  # fmt: skip
            for other in here:
                if other != chosen:
                    owner = chosen == bound.get(name, chosen)
                    self._warn(name, other, chosen, REFUSED if owner else REFUSED + NOT_OWNER)
        if new:
            self.bindings.bind(new, keys={name: self._key(node) for name, node in new.items() if self._key(node)})

    def _key(self, node: int) -> str:
        return self.present[node].key if node in self.present else ""

    def _with_key(self, name: str, claims: Sequence[int], key: str, bound: Mapping[str, int]) -> list[int]:
        """Those of the claims that may have a name which belongs to a key."""
        if not key:
            return list(claims)
        for node in claims:
            if self._key(node) != key:
                self._warn(name, node, bound.get(name, 0), OTHER_KEY)
        return [node for node in claims if self._key(node) == key]

    def _warn(self, name: str, node: int, other: int, text: str, more: str = "") -> None:
        if (name, node, other) not in self._told:
            self._told.add((name, node, other))
            self.warnings.append(f"{name}: node {node} {text.format(node, other, name, plain(more))}")


def _row(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def reason_of(reply: Message) -> str:
    """The text of an error in one line, the exception's kind first unless it is one made for users; or its code."""
    lines = [line for line in plain(reply.error.reason or "", lines=True).splitlines() if line.strip()]
    told = lines[-1:] if lines and lines[0].startswith("Traceback") else lines  # which names the exception at its end
    words = " ".join(" ".join(told).split()).removeprefix("fedloom.conf.errors.UserError: ")
    return words[:MOST_TOLD] or f"error code {reply.error.code}"
