"""Which node is which site: a node says so itself. A taken name goes to another node only if its holder is gone.

A site's contributions belong to the node that joined first under its name. With Flower's authentication, the name then
belongs to that node's key. A key that the operator registered under another name cannot claim it. Without authentication,
another node may train under the name of a site whose node is gone, but it never receives the earlier contributions. In both
cases, the operator can give the name to another node (`fedloom readmit RUN SITE --node ID`).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import PROTOCOL, QUERY, WHO
from fedloom.conf.errors import UserError, plain
from fedloom.conf.formatting import count
from fedloom.conf.sites import Site
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.rounds.nodes import NONCE, InMemoryBindings, Node, nodes_of, nonce

POLL_SECONDS = 0.2
REFRESH_SECONDS = 15.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0  # between questions to an unidentified node; doubles each time
ANSWER_SECONDS = 60.0  # after which a question counts as lost
MOST_REASON = 300  # characters of an error
MOST_NAME = 100  # characters of a node's name
MOST_NAMED = 5
PATIENCE_SECONDS = 1.0  # for a first answer, even if the time to join is shorter
REFUSED = "also claims this name and is refused: node {1} is {2}"
OTHER_NAME = "claims to be {2} and is refused: its key is registered as '{3}'"
OTHER_KEY = "has another key than {2} joined with and is refused ('fedloom readmit RUN {2} --node {0}' accepts the new key)"
NOT_OWNER = ", but not the node that sent the stored contributions ('fedloom readmit RUN {2} --node ID' chooses one)"


@dataclass
class _Asked:
    """A node that has not identified itself: its failures, the time of the next question, and the pending question."""

    failures: int = 0
    due: float = 0.0
    message: str = ""
    sent: float = 0.0

    def fail(self, now: float) -> None:
        """Count a failure, and wait longer before the next question."""
        self.message, self.due = "", now + min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2**self.failures)
        self.failures += 1


@dataclass
class Enrolment:
    """Finds out which connected node is which site.

    `bindings`: which node and key each site's contributions belong to. `warnings`: for the user; the caller shows and
    removes them.
    """

    grid: Grid
    sites: Sequence[Site]
    bindings: Ledger | InMemoryBindings
    nodes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    present: dict[int, Node] = field(default_factory=dict)
    _claims: dict[str, list[int]] = field(default_factory=dict)  # by name, the nodes that claim it, oldest first
    _known: set[int] = field(default_factory=set)  # nodes that have identified themselves
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _warned: set[tuple[str, int, int]] = field(default_factory=set)
    _failure: str = ""
    _others: dict[int, str] = field(default_factory=dict)  # names of connected nodes that are not a site of this run
    _named: set[str] = field(default_factory=set)  # the names of those that the user has been warned of

    def __post_init__(self) -> None:
        self._by_place = {str(site.index): site.name for site in self.sites}
        self._names = {site.name for site in self.sites}

    def simulate(self) -> None:
        """Assign a simulation's nodes to the sites by index, without asking them."""
        nodes = dict(enumerate(sorted(self.grid.get_node_ids())))
        self.nodes = {site.name: nodes[site.index] for site in self.sites}
        self._claims = {name: [node] for name, node in self.nodes.items()}
        self.present = {node: Node(node) for node in nodes.values()}
        self._known = set(self.present)
        self.bindings.bind(self.nodes)

    def join(self, timeout: float, fewest: int = 0, unneeded: Collection[str] = ()) -> None:
        """Wait until every site is connected, except `unneeded` ones, for at most `timeout` seconds.

        After that, `fewest` connected sites are enough (0: all are needed). A site that connects later participates from
        then on. Raises UserError naming the missing sites.
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
                    self.warnings.append(f"{count(len(missing), 'site')} may connect later: {_row(missing)}")
                    return self._tell_others()
                named, failure = _row(missing), f"; last failure: {self._failure}" if self._failure else ""
                others = _row(sorted(self._others.values()))
                failure = f"; connected, but not a site of this run: {others}{failure}" if others else failure
                raise UserError(
                    f"{len(missing)} of {len(self.sites)} sites did not join within {timeout:g} s: {named} "
                    f"(start their nodes, or raise federation.join_timeout{failure})"
                )
            if not heard:
                time.sleep(self._pause())

    def refresh(self, timeout: float = REFRESH_SECONDS) -> None:
        """Update which nodes are connected. Wait for answers, at most `timeout` seconds, only while a site has no node."""
        begin = time.monotonic()
        while True:
            heard = self.poll()
            absent = any(self.nodes.get(site.name) not in self.present for site in self.sites)
            if not (absent and self._waiting()) or time.monotonic() - begin > timeout:
                return self._tell_others()
            if not heard:
                time.sleep(self._pause())

    def poll(self) -> bool:
        """Ask unidentified nodes which site they are, and process the answers so far. Return whether any arrived."""
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
                if not message:  # the node is no longer registered
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
        """Return the ids of the connected nodes that claim to be the site, oldest claim first."""
        return self._claims.get(site, [])

    def owns(self, site: str) -> bool:
        """Return whether the site's current node is the one that its stored contributions belong to."""
        return self.nodes.get(site) == self.bindings.bound().get(site)

    def _look(self) -> None:
        """Update which nodes are connected. A node that was gone is asked again, as it may return as another site."""
        self.present = nodes_of(self.grid)
        self._known &= self.present.keys()
        self._others = {node: name for node, name in self._others.items() if node in self.present}
        self._claims = {name: [node for node in nodes if node in self.present] for name, nodes in self._claims.items()}
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.present}
        for node in self.present.keys() - self._known:
            self._asked.setdefault(node, _Asked())

    def _waiting(self) -> bool:
        """Return whether a question is pending that may still be answered."""
        now = time.monotonic()
        return any(asked.message and now - asked.sent < REFRESH_SECONDS for asked in self._asked.values())

    def _pause(self) -> float:
        return getattr(self.grid, "poll_seconds", POLL_SECONDS)

    def _hear(self, node: int, reply: Message) -> None:
        who = None if reply.has_error() else reply.content.config_records.get(WHO)
        if who is not None and who.get("protocol") != PROTOCOL:
            self._asked[node].fail(time.monotonic())
            self._failure = f"node {node} uses another version of fedloom's messages; install the server's version there"
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
        """Warn of connected nodes that are not asked, once for each name."""
        if new := sorted({*self._others.values()} - self._named):
            self._named.update(new)
            forgotten = [name for name in new if name in self.bindings.bound()]  # its members once had these nodes
            if forgotten:
                again = "'fedloom readmit RUN SITE' lets one participate again"
                self.warnings.append(
                    f"connected, but not asked, because this run has forgotten them: {_row(forgotten)} ({again})"
                )
            if new := [name for name in new if name not in forgotten]:
                self.warnings.append(f"connected, but not asked, because they are not sites of this run: {_row(new)}")

    def _assign(self) -> None:
        """Assign each name: to the node that it is bound to, else to its current holder, else to the oldest claim."""
        bound, keys, new = self.bindings.bound(), self.bindings.keys(), dict[str, int]()
        for name, claims in self._claims.items():
            allowed = self._with_key(name, claims, keys.get(name, ""), bound)
            holder = self.nodes.get(name)
            if (chosen := next((node for node in (bound.get(name), holder, *allowed) if node in allowed), None)) is None:
                continue
            self.nodes[name] = chosen
            if bound.get(name) != chosen and keys.get(name):
                new[name] = chosen  # the same key, known to Flower as another node
            elif name not in bound or (chosen == bound[name] and name not in keys and self._key(chosen)):
                new[name] = chosen
            elif chosen not in (holder, bound[name]):
                self._warn(name, chosen, bound[name], "takes the place of node {1}, which is gone, but does not receive "
                           "its contributions ('fedloom readmit RUN {2} --node {0}' allows it)")  # fmt: skip
            for other in allowed:
                if other != chosen:
                    owner = chosen == bound.get(name, chosen)
                    self._warn(name, other, chosen, REFUSED if owner else REFUSED + NOT_OWNER)
        if new:
            self.bindings.bind(new, keys={name: self._key(node) for name, node in new.items() if self._key(node)})

    def _key(self, node: int) -> str:
        return self.present[node].key if node in self.present else ""

    def _with_key(self, name: str, claims: Sequence[int], key: str, bound: Mapping[str, int]) -> list[int]:
        """Return the claims that may have a name that belongs to a key."""
        if not key:
            return list(claims)
        for node in claims:
            if self._key(node) != key:
                self._warn(name, node, bound.get(name, 0), OTHER_KEY)
        return [node for node in claims if self._key(node) == key]

    def _warn(self, name: str, node: int, other: int, text: str, more: str = "") -> None:
        if (name, node, other) not in self._warned:
            self._warned.add((name, node, other))
            self.warnings.append(f"{name}: node {node} {text.format(node, other, name, plain(more))}")


def _row(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def reason_of(reply: Message) -> str:
    """Return an error reply's text in one line, or its code. The exception's type comes first, unless it is a UserError."""
    lines = [line for line in plain(reply.error.reason or "", lines=True).splitlines() if line.strip()]
    shown = lines[-1:] if lines and lines[0].startswith("Traceback") else lines  # which names the exception at its end
    text = " ".join(" ".join(shown).split()).removeprefix("fedloom.conf.errors.UserError: ")
    return text[:MOST_REASON] or f"error code {reply.error.code}"
