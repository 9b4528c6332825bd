"""Have the nodes of forgotten sites delete what they store, and note their answers in the ledger.

This applies to real federations only: simulated sites store their states in the run's folder. A node that is offline is
asked when it reconnects. Until then its part of a request is outstanding, as the certificate says.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import CONFIG, ERASE, ERASED, ORDER, TaskInstructions, config_digest, text_record
from fedloom.clients.protocol.reply_checks import ReplyError, check_numbers
from fedloom.clients.protocol.signatures import erased_words, fingerprint, verified_signature
from fedloom.conf import to_json
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.channel import ClientChannel

AT_SITE = "erased at site"  # an event
WAIT_SECONDS = 60.0  # for an answer
MOST_COUNT = 2**53 - 1  # the largest whole number in canonical JSON (RFC 8785)


def at_sites(ledger: Ledger, request: str, sites: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return the answers of a request's sites, by site: what their nodes say that they deleted, and when.

    A value is None until the node answers; sites without a node are left out. It includes the node's signature and key, if
    it signs (clients.protocol.signatures).
    """
    keys = (*ERASED, "signature", "key")
    answers = {event.body["site"]: {**{key: event.body[key] for key in keys if key in event.body}, "time": event.time}
            for event in ledger.events(AT_SITE) if event.body["request"] == request}  # fmt: skip
    joined = ledger.bound()
    return {site: answers.get(site) for site in sites if site in joined}


def outstanding(ledger: Ledger) -> dict[str, str]:
    """Return the request's id for each forgotten site whose node has not deleted its store yet."""
    forgotten_sites = {site for site, forgotten in ledger.sites().items() if forgotten}
    waiting: dict[str, str] = {}
    for event in ledger.events("forgotten"):
        if request := event.body.get("request"):
            answers = at_sites(ledger, request, event.body["sites"])
            waiting |= {site: request for site, done in answers.items() if done is None and site in forgotten_sites}
    return waiting


def outstanding_text(ledger: Ledger) -> str:
    """Return a line for the user with the sites of `outstanding`; empty without any."""
    if not (sites := sorted(outstanding(ledger))):
        return ""
    return (f"outstanding: nodes of {', '.join(sites)} have not deleted their data yet; "
            f"'fedloom resume {ledger.folder}' asks them again")  # fmt: skip


def _deleted(content: RecordDict) -> dict[str, int]:
    """Return the numbers of files and bytes in a node's answer. Raises ReplyError unless a certificate can state them."""
    numbers = check_numbers(content, ERASED)
    for name in ERASED:
        if not 0 <= numbers[name] <= MOST_COUNT or numbers[name] % 1:
            raise ReplyError(f"'{name}' is {numbers[name]:g}; takes a whole number from 0 to 2^53 - 1")
    return {name: int(numbers[name]) for name in ERASED}


@dataclass
class Erasure:
    """Asks the nodes of forgotten sites to delete their stores.

    Attributes:
        config: The run's configuration.
        ledger: Records the requests and the nodes' answers.
        grid: Sends messages to the nodes.
        message: Shows the user a line.
    """

    config: Config
    ledger: Ledger
    grid: Grid
    message: Callable[[str], None]

    def tell(self) -> Mapping[str, str]:
        """Ask online nodes to delete their stores. Return the request's id for each site that has now done so."""
        if not (waiting := outstanding(self.ledger)):
            return {}
        federation = self._reached(waiting)
        reached = [site for site in federation.sites if federation.enrolment.owns(site.name)]
        done: dict[str, str] = {}
        for reply in federation.ask(
            ERASE, ((site, self._order(site, waiting[site.name])) for site in reached), 1, WAIT_SECONDS
        ):
            try:
                numbers = _deleted(reply.content) if reply.content is not None else {}
            except ReplyError as error:
                self.message(f"{reply.site.name}: its answer does not say what it deleted: {error}")
                continue
            if numbers:
                self._note(reply.site.name, waiting[reply.site.name], numbers, reply.content)
                done[reply.site.name] = waiting[reply.site.name]
            else:
                self.message(f"{reply.site.name}: its node did not delete its store: {reply.reason}")
        return done

    def _reached(self, waiting: Mapping[str, str]) -> ClientChannel:
        """Return a channel to the forgotten sites whose nodes are online and have identified themselves."""
        online, bound = set(self.grid.get_node_ids()), self.ledger.bound()
        sites = [site for site in self.config.roster if site.name in waiting and bound.get(site.name) in online]
        federation = ClientChannel(self.grid, sites, 0, self.ledger)
        if sites:
            with contextlib.suppress(UserError):  # a node did not answer
                federation.join(WAIT_SECONDS)
        return federation

    def _order(self, site: Site, request: str) -> RecordDict:
        text = to_json(self.config)
        order = TaskInstructions(
            config=config_digest(text), run=self.ledger.run().run, site=site.index, round=1, rounds=1, base=0, members=1,
            kind=ERASE, request=request,
        )  # fmt: skip
        return RecordDict({ORDER: order.record(), CONFIG: text_record(text)})

    def _note(self, site: str, request: str, numbers: Mapping[str, int], content: RecordDict | None) -> None:
        payload = erased_words(self.ledger.run().run, site, *(numbers[name] for name in ERASED), request=request)
        signed = verified_signature(content, *payload) if content is not None else {}
        if signed and fingerprint(signed["key"]) != self.ledger.keys().get(site):
            signed = {}  # signed with a key that is not the site's
        self.ledger.note(AT_SITE, {"request": request, "site": site, **numbers, **signed})
        self.message(f"{site}: deleted its store of the run: {numbers['files']} files, {numbers['bytes']:,} bytes")
