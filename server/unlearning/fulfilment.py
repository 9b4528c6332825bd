"""Remove sites on request: subtract and delete their contributions, and certify it.

A request is received, then applied (in one transaction of the ledger), then verified. After a crash, it continues where it
stopped.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.clients.networks import Model
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger, LedgerError, Request
from fedloom.server.ledger.tables import BEGUN
from fedloom.server.rounds.masks import rounds_together
from fedloom.server.rounds.schedules import Restoration
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.layout import delete
from fedloom.server.unlearning.certificate import certificate, check_sums, issue, reissue
from fedloom.server.unlearning.client_erasure import Erasure
from fedloom.server.unlearning.goals import goals
from fedloom.server.unlearning.requests import BACK, KIND, RESTORE, SHARE_BACK, check_links, left_of, refuse

if TYPE_CHECKING:
    from fedloom.server.unlearning.evidence import UnlearningEvaluation

APPLYING, LEAVING = BEGUN  # events; leaving: sites will be forgotten in the next round (secure aggregation)


class RefusedError(UserError):
    """A request that cannot be fulfilled. The ledger notes that it is refused."""


@dataclass
class Unlearning:
    """Fulfils the requests to forget sites of one run, as the run's server.

    Attributes:
        config: The run's configuration.
        folder: The run's folder.
        ledger: The run's ledger, which records the requests.
        state: The server's state, from which sites are subtracted.
        evaluator: Measures networks before and after.
        erasure: In a real federation: asks nodes to delete their stores.
    """

    config: Config
    folder: Path
    ledger: Ledger
    state: ServerState
    evaluator: Evaluator
    erasure: Erasure | None = None  # in a real federation: asks nodes to delete their stores

    def apply(self, request: Request) -> Request:
        """Subtract the sites' contributions, commit that, and erase the rest. Roll back first if the request asks for it.

        A request that is already applied is returned unchanged. Raises RefusedError if it cannot be done; the request is
        then refused for good.
        """
        if request.state != "received":
            return request
        self._refuse(request)
        body = self._before(request)
        self._begin(request, APPLYING, {})
        if request.options.get("rollback"):
            self.state.membership.roll_back(request.sites, body, request.id)
        begin = time.perf_counter()
        self.state.membership.forget(request.sites, body, request.id)
        self.ledger.note("subtracted", {"request": request.id, "seconds": time.perf_counter() - begin})
        self._erase(request)
        self.tell_sites()
        return self.ledger.request(request.id) or request

    def tell_sites(self) -> None:
        """Have the nodes of forgotten sites that are online delete their stores, and update the certificates."""
        for request in dict.fromkeys((self.erasure.tell() if self.erasure else {}).values()):
            reissue(self.ledger, request)

    def certify(self, request: Request, retrained: Model | None = None) -> dict[str, Any]:
        """Check, measure and write the certificate of an applied request, and return it.

        `retrained`: a network that was trained without the sites, for comparison.
        """
        from fedloom.server.unlearning.readings import readings
        from fedloom.server.unlearning.scope import scope

        self._erase(request)  # the networks that were trained since
        self.ledger.prune()  # files that a crash left
        evaluation = self._evaluation(request)
        done = certificate(self.ledger, self.state, request)
        done["evidence"] = evaluation.report((request.result or {})["evidence"], self._aggregate(), retrained)
        done["readings"] = readings(self.config, request.sites, self.state.members(), done["evidence"])
        done["scope"] = scope(done["evidence"])
        done["goals"] = goals(done)
        issue(self.ledger, done)
        self.ledger.set_request(request.id, "verified", request.result)
        return done

    def take(
        self,
        message: Callable[[str], None],
        retrain: Callable[[Request], Model] | None = None,
        can: Callable[[Request], bool] = lambda request: True,
        mine: str = "",
    ) -> bool:
        """Between two rounds, apply waiting requests and certify those that are due.

        Requests after a rollback wait until its rounds are trained.

        Args:
            message: Shows the user a line.
            retrain: Trains a network without a request's sites. None: requests that ask for one are not certified.
            can: Whether a request can be fulfilled here. Others stay unchanged.
            mine: The id of the request whose refusal or certificate the caller reports.

        Returns:
            Whether anything changed.
        """
        changed = False
        self.state.leaving = []
        for request in filter(can, self.under_way()):
            if request.state == "received" and self._leaves(request, message, mine):
                continue
            if request.state == "received":
                request = self._taken(request, message, mine)
                changed |= request.state == "applied"
            if request.state != "applied":
                continue
            if self._due(request) > self.last_round():
                if request.options.get("rollback"):
                    break
            elif retrain or not request.options.get("retrain"):
                self.certify(request, retrain(request) if retrain and request.options.get("retrain") else None)
                if request.id != mine:
                    message(
                        f"Request '{request.id}' is verified: the contributions of {', '.join(request.sites)} are removed."
                    )
                changed = True
        return changed

    def lifted(self, message: Callable[[str], None]) -> None:
        """Forget the leaving sites, after a round in which the others have removed the masks that they share with them."""
        for request in self.under_way():
            if request.state == "received" and set(request.sites) <= set(self.state.leaving):
                self._taken(request, message, "")
        self.state.leaving = []

    def _leaves(self, request: Request, message: Callable[[str], None], mine: str) -> bool:
        """Return whether the request must wait for a round in which other sites remove shared masks."""
        masked = any(pair & set(request.sites) for pair in rounds_together(self.ledger))
        if request.options.get("rollback") or not (masked or self.state.features.has_summed(request.sites)):
            return False
        if self.state.leaving:
            try:
                self.state.check_forgetting([*self.state.leaving, *request.sites])
            except UserError as error:
                message(f"Request '{request.id}' waits until the run has forgotten {', '.join(self.state.leaving)}: {error}")
                return True
        try:
            self._refuse(request)
            if not self._noted(request, LEAVING):
                self._begin(request, LEAVING, {"sites": request.sites, "body": self._before(request)})
        except RefusedError as error:
            if request.id != mine:
                message(str(error))
            return True
        message(f"Request '{request.id}': in the next round, others remove their masks with {', '.join(request.sites)}.")
        self.state.leaving = [*self.state.leaving, *request.sites]
        return True

    def _begin(self, request: Request, kind: str, body: dict[str, Any]) -> None:
        """Note that a request is being applied. Raises RefusedError if it was cancelled meanwhile."""
        if not self.ledger.begin(request.id, kind, body):
            raise RefusedError(f"Request '{request.id}' was cancelled.")

    def _noted(self, request: Request, *kinds: str) -> dict[str, Any] | None:
        """Return the state before a request changed anything, as an event of these kinds noted it; None without one."""
        events = (event for event in self.ledger.events() if event.kind in kinds)
        return next((event.body["body"] for event in events if event.body.get("request") == request.id), None)

    def screen(self, message: Callable[[str], None], mine: str = "") -> None:
        """Refuse the waiting requests that cannot be fulfilled, before anything starts for them; arguments as in `take`."""
        for request in self.under_way():
            if request.state == "received":
                try:
                    self._refuse(request)
                except RefusedError as error:
                    if request.id != mine:
                        message(str(error))

    def tidy(self) -> None:
        """Delete the files that a crash has left of forgotten sites, for each unfinished request."""
        for request in self.under_way():
            if request.state == "applied":
                self._erase(request)

    def _evaluation(self, request: Request) -> "UnlearningEvaluation":
        from fedloom.server.unlearning.evidence import UnlearningEvaluation  # imported only here: slow

        return UnlearningEvaluation(self.config, self.evaluator, request.sites)

    def _before(self, request: Request) -> dict[str, Any]:
        """Return digests and evidence before the request changes anything, as noted earlier if it crashed since."""
        if known := self._noted(request, "rolled back", LEAVING):
            return {**known, "round": self.last_round()} if not request.options.get("rollback") else known
        evidence = self._evaluation(request).of(self._aggregate())
        return {"digest_before": self.state.digest(), "evidence": evidence, "round": self.last_round()}

    def _taken(self, request: Request, message: Callable[[str], None], mine: str) -> Request:
        """Apply a waiting request, and report if it is refused."""
        try:
            request = self.apply(request)
        except RefusedError as error:
            if request.id != mine:
                message(str(error))
            return request
        if (due := self._due(request)) > self.last_round():
            message(f"Request '{request.id}' is applied: the contributions of {', '.join(request.sites)} are removed. "
                 f"The certificate follows after round {due}.")  # fmt: skip
        return request

    def last_round(self) -> int:
        """Return the number of the last committed round."""
        last = self.ledger.last_round()
        return last.round if last else 0

    def goal(self) -> int:
        """Return the round up to which unfinished requests need training; 0 if none does."""
        due = [self._due(request) for request in self.under_way() if request.state == "applied"]
        return max([*due, self.last_round() + 1 if self.state.leaving else 0])

    def _aggregate(self) -> Model | None:
        """Return the network that is measured before and after; None if each site has its own network."""
        return self.state.aggregate() if self.state.display_name else None

    def _refuse(self, request: Request) -> None:
        """Refuse a request that cannot be fulfilled: note it and raise RefusedError."""
        try:
            refuse(self.ledger, request.sites)
            if request.options.get("retrain") and not self.state.display_name:
                raise UserError("--retrain compares aggregates, and this method has no aggregate; leave the option out")
            if request.options.get(RESTORE) and request.options.get("rollback"):
                raise UserError("--restore: --rollback trains again from before the sites joined; leave one out")
            if request.options.get(RESTORE):
                self.state.check_restoration()
            self.state.check_forgetting(request.sites, rollback=bool(request.options.get("rollback")))
            if request.options.get("recalibrate"):
                self.state.check_recalibration(request.sites)
            check_sums(self.ledger)
        except LedgerError:  # a fault of the ledger, not of the request
            raise
        except UserError as error:
            self.ledger.set_request(request.id, "refused", {"reason": str(error)})
            raise RefusedError(f"Request '{request.id}' is refused: {error}") from None

    def _erase(self, request: Request) -> None:
        """Note and delete what this machine stores of the sites outside the ledger, and their values in metrics.jsonl."""
        gone = {site for site, forgotten in self.ledger.sites().items() if forgotten}
        paths = left_of(self.folder, request, gone)
        check_links(paths)
        names = [str(path.relative_to(self.folder)) for path in paths]
        if names:
            self.ledger.note("erased", {"request": request.id, "paths": names})
        for name in names:
            delete(self.folder, name)
        run = RunFolder(self.folder)
        run.forget_values(gone)
        run.note_tables(self.state.domains())

    def under_way(self) -> list[Request]:
        """Return the requests that are not certified yet, oldest first."""
        return [request for request in self.ledger.waiting(applied=True) if request.kind == KIND]

    def _due(self, request: Request) -> int:
        """Return the round after which an applied request is certified, including the rounds that its options add."""
        options = request.options
        further = sum(int(options.get(option, 0)) for option in (RESTORE, "repair", "recalibrate"))
        return int((request.result or {})["round"]) + further

    def restoration(self, round: int) -> Restoration | None:
        """Return the restoration to which a round belongs, that of the latest request with --restore; None: none."""
        for request in reversed(self.under_way()):
            number, rounds = round - int((request.result or {}).get("round", round)), int(request.options.get(RESTORE, 0))
            if request.state == "applied" and 1 <= number <= rounds:
                return Restoration(number, rounds, float(request.options.get(BACK, SHARE_BACK)))
        return None

    def recalibrates(self, round: int) -> bool:
        """Return whether sites send statistics in this round, for a request with --recalibrate."""
        applied = (request for request in self.under_way() if request.state == "applied")
        return any(request.options.get("recalibrate") and self._due(request) == round for request in applied)
