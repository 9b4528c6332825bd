"""Removing sites on request: what they gave is subtracted and deleted, and a certificate says what that proves.

A request is received, then applied (one transaction of the ledger), then verified. It is taken up where a crash left it.
"""

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.clients.networks import Model
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger, LedgerError, Request
from fedloom.server.rounds.masks import rounds_together
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run_folder.layout import BASELINES, RETRAINED, SITES, STAGING, STATES
from fedloom.server.unlearning.certificate import certificate, check_sums, issue, reissue
from fedloom.server.unlearning.client_erasure import Erasure

if TYPE_CHECKING:
    from fedloom.server.unlearning.evidence import UnlearningEvaluation

KIND = "unlearn"
LEAVING = "leaving"  # an event: the sites of a request are forgotten in the next round (secure aggregation)
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")  # it names files


class RefusedError(UserError):
    """A request that cannot be fulfilled, which the ledger says, too."""


@dataclass
class Unlearning:
    """All that is needed to fulfil requests of one run, whose server this is."""

    config: Config
    folder: Path
    ledger: Ledger
    state: ServerState
    evaluator: Evaluator
    erasure: Erasure | None = None  # where nodes can be told

    def apply(self, request: Request) -> Request:
        """Subtract the sites' contributions, commit that and erase the rest, unless it is done; roll back first if asked to.

        Raises RefusedError if that cannot be done, and then it is refused for good.
        """
        if request.state != "received":
            return request
        self._refuse(request)
        body = self._before(request)
        if request.options.get("rollback"):
            self.state.roll_back(request.sites, body, request.id)
        begin = time.perf_counter()
        self.state.forget(request.sites, body, request.id)
        self.ledger.note("subtracted", {"request": request.id, "seconds": time.perf_counter() - begin})
        self._erase(request)
        self.tell_sites()
        return self.ledger.request(request.id) or request

    def tell_sites(self) -> None:
        """Have forgotten sites delete what they keep, as far as their nodes are there; certificates say so."""
        for request in dict.fromkeys((self.erasure.tell() if self.erasure else {}).values()):
            reissue(self.ledger, request)

    def certify(self, request: Request, retrained: Model | None = None) -> dict[str, Any]:
        """Check, measure and write the certificate of an applied request.

        `retrained`: a network that was trained without them, to compare with.
        """
        from fedloom.server.unlearning.scope import scope

        self._erase(request)  # what was trained since
        self.ledger.prune()  # what a crash has left
        evaluation = self._evaluation(request)
        done = certificate(self.ledger, self.state, request)
        done["evidence"] = evaluation.report((request.result or {})["evidence"], self._aggregate(), retrained)
        done["scope"] = scope(done["evidence"])
        issue(self.ledger, done)
        self.ledger.set_request(request.id, "verified", request.result)
        return done

    def take(
        self,
        told: Callable[[str], None],
        retrain: Callable[[Request], Model] | None = None,
        can: Callable[[Request], bool] = lambda request: True,
        mine: str = "",
    ) -> bool:
        """Between rounds: apply the requests that wait, certify those that are due, and tell of it; whether there were any.

        `retrain`: trains a network without a request's sites; without it, those that ask for one are not certified.
        `can`: whether a request can be fulfilled here; others are left as they are.
        `mine`: the request of whose refusal or certificate the caller tells.
        Requests that come after a rollback wait until its rounds are trained: before, there is little to measure.
        """
        changed = False
        self.state.leaving = []
        for request in filter(can, self.under_way()):
            if request.state == "received" and self._leaves(request, told, mine):
                continue
            if request.state == "received":
                request = self._taken(request, told, mine)
                changed |= request.state == "applied"
            if request.state != "applied":
                continue
            if self._due(request) > self.last_round():
                if request.options.get("rollback"):
                    break
            elif retrain or not request.options.get("retrain"):
                self.certify(request, retrain(request) if retrain and request.options.get("retrain") else None)
                if request.id != mine:
                    told(f"request '{request.id}' verified: {', '.join(request.sites)} forgotten")
                changed = True
        return changed

    def lifted(self, told: Callable[[str], None]) -> None:
        """After a round in which the others have taken out their masks in common with sites that leave: forget them."""
        for request in self.under_way():
            if request.state == "received" and set(request.sites) <= set(self.state.leaving):
                self._taken(request, told, "")
        self.state.leaving = []

    def _leaves(self, request: Request, told: Callable[[str], None], mine: str) -> bool:
        """Whether what a request's sites gave is under masks, which others must take out in a round before it is applied."""
        if request.options.get("rollback") or not any(pair & set(request.sites) for pair in rounds_together(self.ledger)):
            return False
        if self.state.leaving:
            try:
                self.state.check_forgetting([*self.state.leaving, *request.sites])
            except UserError as error:
                told(f"request '{request.id}' waits until {', '.join(self.state.leaving)} are forgotten: {error}")
                return True
        try:
            self._refuse(request)
        except RefusedError as error:
            if request.id != mine:
                told(str(error))
            return True
        if not self._noted(request, LEAVING):
            self.ledger.note(LEAVING, {"request": request.id, "sites": request.sites, "body": self._before(request)})
        told(f"request '{request.id}': in the next round the others take their masks with {', '.join(request.sites)} out")
        self.state.leaving = [*self.state.leaving, *request.sites]
        return True

    def _noted(self, request: Request, *kinds: str) -> dict[str, Any] | None:
        """What an event of these kinds says was before a request changed anything; None if there is none."""
        events = (event for event in self.ledger.events() if event.kind in kinds)
        return next((event.body["body"] for event in events if event.body.get("request") == request.id), None)

    def screen(self, told: Callable[[str], None], mine: str = "") -> None:
        """Refuse what cannot be fulfilled of the requests that wait, before anything starts for them; `mine` as above."""
        for request in self.under_way():
            if request.state == "received":
                try:
                    self._refuse(request)
                except RefusedError as error:
                    if request.id != mine:
                        told(str(error))

    def tidy(self) -> None:
        """Erase what a crash has left of sites that are forgotten, where a request is under way."""
        for request in self.under_way():
            if request.state == "applied":
                self._erase(request)

    def _evaluation(self, request: Request) -> "UnlearningEvaluation":
        from fedloom.server.unlearning.evidence import UnlearningEvaluation  # attacks: only where a request is carried out

        return UnlearningEvaluation(self.config, self.evaluator, request.sites)

    def _before(self, request: Request) -> dict[str, Any]:
        """What is known before anything is changed; of a request that was rolled back when it crashed, what was then."""
        if known := self._noted(request, "rolled back", LEAVING):
            return {**known, "round": self.last_round()} if not request.options.get("rollback") else known
        evidence = self._evaluation(request).of(self._aggregate())
        return {"digest_before": self.state.digest(), "evidence": evidence, "round": self.last_round()}

    def _taken(self, request: Request, told: Callable[[str], None], mine: str) -> Request:
        """Apply a request that waits, if it is not refused."""
        try:
            request = self.apply(request)
        except RefusedError as error:
            if request.id != mine:
                told(str(error))
            return request
        if (due := self._due(request)) > self.last_round():
            told(f"request '{request.id}' applied: {', '.join(request.sites)} forgotten; certified after round {due}")
        return request

    def last_round(self) -> int:
        """The number of the last committed round."""
        last = self.ledger.last_round()
        return last.round if last else 0

    def goal(self) -> int:
        """The round up to which the requests under way want to be trained; 0 if none does."""
        due = [self._due(request) for request in self.under_way() if request.state == "applied"]
        return max([*due, self.last_round() + 1 if self.state.leaving else 0])

    def _aggregate(self) -> Model | None:
        """What is measured before and after; None if the method's networks are the sites' own."""
        return self.state.aggregate() if self.state.display_name else None

    def _refuse(self, request: Request) -> None:
        """RefusedError, which is noted, for a request that cannot be fulfilled."""
        try:
            refuse(self.ledger, request.sites)
            if request.options.get("retrain") and not self.state.display_name:
                raise UserError("--retrain: compares aggregates, and this method has none; ask without it")
            self.state.check_forgetting(request.sites, rollback=bool(request.options.get("rollback")))
            if request.options.get("recalibrate"):
                self.state.check_recalibration(request.sites)
            check_sums(self.ledger)
        except LedgerError:  # that is not the request's fault
            raise
        except UserError as error:
            self.ledger.set_request(request.id, "refused", {"reason": str(error)})
            raise RefusedError(f"request '{request.id}' is refused: {error}") from None

    def _erase(self, request: Request) -> None:
        """Note and delete what this machine keeps of the sites beside the ledger."""
        if left := left_of(self.folder, request, [site for site, gone in self.ledger.sites().items() if gone]):
            paths = [str(path.relative_to(self.folder)) for path in left]
            self.ledger.note("erased", {"request": request.id, "paths": paths})
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def under_way(self) -> list[Request]:
        """The requests that are not certified yet, oldest first."""
        return [request for request in self.ledger.waiting(applied=True) if request.kind == KIND]

    def _due(self, request: Request) -> int:
        """The round after which an applied request is certified: where it was, and those that its options ask for."""
        options = request.options
        return int((request.result or {})["round"]) + int(options.get("repair", 0)) + bool(options.get("recalibrate"))

    def recalibrates(self, round: int) -> bool:
        """Whether a round is the one in which sites tell of the aggregates, for a request that wants that."""
        applied = (request for request in self.under_way() if request.state == "applied")
        return any(request.options.get("recalibrate") and self._due(request) == round for request in applied)


def wants_training(config: Config, options: Mapping[str, Any]) -> bool:
    """Whether a request with these options is fulfilled only with sites that train."""
    return config.federation.secure_aggregation or any(
        options.get(option) for option in ("repair", "rollback", "retrain", "recalibrate")
    )


def receive(ledger: Ledger, id: str, sites: Sequence[str], reason: str, options: dict[str, Any]) -> Request:
    """Note a request, beside a server as well; that of an id that is known stands. UserError for what cannot be done."""
    if (known := ledger.request(id)) is not None:
        return known
    if not _ID.fullmatch(id):
        raise UserError(f"request id: got '{id}'; take up to 100 of A-Z, a-z, 0-9, '.', '_' and '-'")
    if not _is_text(reason):
        raise UserError(f"reason: got {reason!a}, which is no text in UTF-8")
    refuse(ledger, sites)
    return ledger.receive(id, KIND, sites, reason, options)


def _is_text(words: str) -> bool:
    """Whether it can be written; bytes of a command line that are none in UTF-8 cannot."""
    return words.encode(errors="ignore").decode() == words


def refuse(ledger: Ledger, sites: Sequence[str]) -> None:
    """UserError for sites that are unknown, named twice or forgotten, for all of them, and where nothing is summed."""
    known = ledger.sites()
    for place, name in enumerate(sites):
        if name not in known:
            raise unknown("site", name, known)
        if name in sites[:place]:
            raise UserError(f"the site '{name}' is named twice")
        if known[name]:
            raise UserError(f"the site '{name}' is forgotten already ('fedloom ledger' shows by which request)")
    if len(sites) >= sum(not gone for gone in known.values()):
        raise UserError("no site would be left: delete the run's folder instead")
    slots = next(ledger.events("created")).body.get("slots")  # older ledgers do not say it
    if not (ledger.last_round() is None or ledger.all_latest() if slots is None else slots):
        raise UserError(
            f"{ledger.folder}: its method keeps no contributions: no site's part can be subtracted; train again without it"
        )


def left_of(folder: Path, request: Request, forgotten: Sequence[str]) -> list[Path]:
    """What this machine keeps of a request's sites beside the ledger.

    Their own stores, what workers wrote for them, all networks (they are written anew from what is left), and what was
    trained with them and is never subtracted: baselines, and networks retrained for other requests. Of its sites, those that
    are `forgotten`: one may be readmitted.
    """
    sites = [name for name in request.sites if name in forgotten]
    found = [path for name in sites for path in (folder / SITES).glob(f"*/{name}")]
    found += [folder / STAGING / name for name in sites]
    found += [folder / STATES, folder / BASELINES]
    found += [path for path in (folder / RETRAINED).glob("*") if path.name != request.id]
    return [path for path in found if path.exists()]
