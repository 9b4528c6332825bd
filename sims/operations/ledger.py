"""List the events of a run's ledger, check its files, and remove files that nothing refers to."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain
from fedloom.conf.formatting import count
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.database import LEDGER
from fedloom.server.run_folder.layout import BLOBS, RETRAINED, delete
from fedloom.server.unlearning.certificate import CERTIFICATES, changed, forged
from fedloom.sims.operations.unlearn import without_server
from fedloom.sims.progress.listeners import Watcher
from fedloom.sims.report.tables import Table

UNITS = {"d": "days", "h": "hours"}
_AGE = re.compile(r"(\d{1,5})([dh])")
MOST_NAMED, DIGITS = 5, 16  # entries of a list, digits of a key's digest


def audit(path: Path, listener: Watcher | None = None) -> dict[str, Any]:
    """Check a run's chain, blobs and sums; return {"ok", "digest", "problems", "notes"}. Notes include waiting requests."""
    if not path.is_dir():
        raise UserError(f"{path}: the folder does not exist; name the folder of a run, such as runs/digits")
    with listener or Watcher():
        lines: dict[str, list[str]] = {"problem": [], "note": []}
        for finding in check(path):
            lines[finding.severity].append(plain(f"{finding.file}: {finding.what}"))
        digest: dict[str, str] = {}
        with contextlib.suppress(UserError), Ledger.open(path, server=False) as ledger:
            last = ledger.last_round()
            digest = last.digest if last else {}
            lines["problem"] += [f"{CERTIFICATES}/{name}: differs from what the server wrote" for name in changed(ledger)]
            lines["problem"] += [
                f"{CERTIFICATES}/{name}: is not the signature of its certificate" for name in forged(ledger)
            ]
            for lost in ledger.lost():
                lines["note"].append(f"{LEDGER}: is older than request '{lost['id']}', which had removed "
                                     f"{', '.join(lost['sites'])}. 'fedloom resume {path}' removes them again")  # fmt: skip
            for request in ledger.waiting(applied=True):
                lines["note"].append(f"{LEDGER}: request '{request.id}' is {request.state}, not verified yet. "
                                     f"A running server will continue it. {without_server(path)}")  # fmt: skip
    return {"ok": not lines["problem"], "digest": digest, "problems": lines["problem"], "notes": lines["note"]}


def events(path: Path) -> list[dict[str, Any]]:
    """Return the ledger's events, oldest first: {"id", "time", "kind", "body", "previous", "digest"}."""
    with Ledger.open(path, server=False) as ledger:
        return [dataclasses.asdict(event) for event in ledger.events()]


def events_table(path: Path, listed: Sequence[dict[str, Any]]) -> Table:
    """Return the events listed by `events` as a table."""
    rows = [[event["id"], event["time"], event["kind"], short(event["body"]), event["digest"][:12]] for event in listed]
    return Table(f"Ledger of {path}", ["#", "time", "event", "what", "digest"], rows)


def prune(path: Path, age: str = "") -> list[str]:
    """Remove files that a run's ledger does not refer to, and return a line for each.

    `age`: such as 90d; also remove what only going back to a round of that age needs, and networks that were retrained for
    requests of that age. Raises UserError for another text.
    """
    cutoff = (datetime.now(UTC) - timedelta(**_age(age))).isoformat(timespec="milliseconds") if age else ""
    with Ledger.open(path) as ledger:
        lines = [f"{BLOBS}/{name}" for name in ledger.prune()]
        if not cutoff:
            return lines
        rows = ledger.rounds()
        young = next((row.round for row in rows if row.time >= cutoff), rows[-1].round if rows else 0)
        if number := ledger.thin(young):
            lines.append(
                f"{count(number, 'file')} of rounds before {young}: --rollback can no longer go back to these rounds"
            )
        old = [id for id, dates in ledger.dates().items() if dates.get("verified", cutoff) < cutoff]
        for folder in (path / RETRAINED / id for id in old):
            if folder.is_dir():
                delete(path, f"{RETRAINED}/{folder.name}")
                lines.append(f"{RETRAINED}/{folder.name}: its certificate stays")
        return lines


def _age(text: str) -> dict[str, int]:
    if not (match := _AGE.fullmatch(text)):
        raise UserError(f"--older-than: got '{text}', takes a number of days, such as 90d, or of hours, such as 12h")
    return {UNITS[match[2]]: int(match[1])}


def short(body: dict[str, Any]) -> str:
    """Return the short parts of an event's body as text."""
    parts = {key: body[key] for key in ("round", "id", "request", "sites", "reason") if body.get(key) not in (None, "", [])}
    texts = {key: _listed(item) if isinstance(item, list) else str(item) for key, item in parts.items()}
    if spent := (body.get("record") or {}).get("epsilon"):
        texts["epsilon"] = _listed([f"{site} {epsilon:.3g}" for site, epsilon in spent.items()])
    if isinstance(joined := body.get("nodes"), dict):
        keys = {site: f" (key {key[:DIGITS]})" for site, key in (body.get("keys") or {}).items()}
        texts["nodes"] = _listed([f"{site} {node}{keys.get(site, '')}" for site, node in joined.items()])
        texts |= {"by": body["by"]} if "by" in body else {}
    return "; ".join(f"{key} {text}" for key, text in texts.items())


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:MOST_NAMED]) + (", ..." if len(items) > MOST_NAMED else "")
