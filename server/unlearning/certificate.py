"""The certificate of a request: what is exact and how that was checked, what is not exact, and what was measured.

`server.unlearning.verification` recomputes what can be recomputed.
"""

import contextlib
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rfc8785

from fedloom.clients.data.sites import value_of
from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.yaml_text import read_json
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import digest
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.blobs import LedgerError, file_digest
from fedloom.server.ledger.sums import added_up
from fedloom.server.ledger.tables import Event
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.layout import CERTIFICATES, SUFFIXES
from fedloom.server.unlearning.client_erasure import at_sites

FORMAT = 1
MOST_SHOWN = 10  # certificates of a folder in an error
CERTIFIED = "certified"  # an event of the ledger, with the sha256 of a certificate
TIMES = ("received", "applied")  # events of a request whose dates a certificate states
OUTSTANDING = "outstanding"
EXACT = ("The sum after the request equals, bit for bit, the sum of the remaining sites' contributions. Nothing of the "
         "forgotten sites' contributions is in it, and their weights are deleted from the ledger. The section on what is "
         "not exact lists what the ledger's events still say about them.")  # fmt: skip
KEPT = ("The method sums nothing: each site's contribution is stored separately. The contributions of the forgotten sites "
        "are deleted from the ledger. Those of the remaining sites, listed here by their sha256, are unchanged. The section "
        "on what is not exact lists what was computed from both, and what the ledger's events still say.")  # fmt: skip
_PARTS = {"format": int, "request": str, "run": str, "sites": list, "reason": str, "options": dict, "times": dict,
          "exact": dict, "not_exact": dict, "erased": list, "ledger": dict, "evidence": dict}  # fmt: skip
_EXACT_PARTS = {"statement": str, "tensors": list, "digest_before": dict, "digest_after": dict, "sum_of_remaining": str,
          "remaining": dict}  # fmt: skip
EVENTS = ("they still have the round, the number of samples and the sha256 of each forgotten contribution. Events are "
          "hash-chained, so they cannot be removed without breaking verification. A hash reveals no weights, but anyone who "
          "holds a copy of a contribution could prove that it was sent.")  # fmt: skip
MASKED = ("the sites' contributions were masked: the server never read a single one, and what it stored of the forgotten "
          "sites looked random. This request reveals more: the server has the sums before and after it. Their difference "
          "is the contribution of the forgotten sites plus the sum of the other sites' updates in the round in which they "
          "left. If the other sites do not change in that round, it is the contribution alone.")  # fmt: skip
COPIES = "backups, trackers, other machines and anyone who received earlier sums or reports: their copies are not deleted"


def certificate(ledger: Ledger, aggregation: ServerState, request: Request) -> dict[str, Any]:
    """Return the certificate of an applied request, without its evidence. Raises UserError if a sum does not match."""
    from fedloom.server.unlearning.superlink import scrub  # imported only here: slow

    event = forgotten_event(ledger, request.id)
    remaining = ledger.all_latest()
    totals = check_sums(ledger)
    return {
        "format": FORMAT,
        "request": request.id,
        "run": ledger.run().run,
        "sites": list(request.sites),
        **({"parts": parts} if (parts := parts_of(aggregation.config, request.sites)) else {}),
        "reason": request.reason,
        **({"by": request.by} if request.by else {}),
        "options": request.options,
        "times": {kind: each.time for kind in TIMES for each in ledger.events(kind) if each.body["id"] == request.id},
        "exact": {
            "statement": EXACT if totals else KEPT,
            "tensors": sorted({name for total in totals.values() for name in total.totals}),
            "digest_before": event.body["body"]["digest_before"],
            "digest_after": event.body["digest"],
            "sum_of_remaining": rest_digest(ledger, totals),
            "remaining": {name: one.blob for name, one in remaining.items()},
        },
        "not_exact": {
            **{one.location: one.reason for one in aggregation.residue(request.sites)},
            **({"masks": MASKED} if aggregation.config.federation.secure_aggregation else {}),
            **({"the SuperLink": remainder} if (remainder := scrub(aggregation.config)) else {}),
            "events of the ledger": EVENTS,
            "copies": COPIES,
        },
        "erased": erased(ledger, request.id),
        "at_sites": at_sites(ledger, request.id, request.sites),
        "ledger": {"event": event.id, "digest": event.digest},
    }


def parts_of(config: Config, sites: Sequence[str]) -> dict[str, str]:
    """Return "COLUMN=VALUE" of sites that have the rows of a table with this value, if this machine has the table."""
    named = [site for site in config.roster if site.name in sites] if has_data(config) else []
    with contextlib.suppress(UserError):
        return {site.name: part for site in named if (part := value_of(config, site))}
    return {}


def names_of(content: Mapping[str, Any]) -> str:
    """Return the names of a certificate's sites, each with its value of the dividing column: `site-0001 (hospital=Milan)`.

    Sites that have no such value stand alone.
    """
    parts = content.get("parts", {})
    return ", ".join(f"{name} ({parts[name]})" if name in parts else name for name in content["sites"])


def check_sums(ledger: Ledger) -> dict[str, ExactSum]:
    """Add up all contributions again and return the sums, by slot. Raises LedgerError if one differs from the stored sum."""
    last, totals = ledger.last_round(), sums_of(ledger)
    if last is None or any(digest(total.totals) != last.digest.get(slot) for slot, total in totals.items()):
        raise LedgerError(f"{ledger.folder}: the stored sum is not the sum of the contributions, so nothing is "
                          f"subtracted or erased; run `fedloom ledger {ledger.folder} --check` for details")  # fmt: skip
    return totals


def issue(ledger: Ledger, content: dict[str, Any]) -> None:
    """Write the certificate `content` into the run's folder, sign it if possible, and note its sha256 in the ledger."""
    text = text_of(content).encode()
    path = ledger.folder / CERTIFICATES / f"{content['request']}.json"
    ledger.note(CERTIFIED, {"request": content["request"], "sha256": hashlib.sha256(text).hexdigest()})
    RunFolder(ledger.folder).note_written(f"{CERTIFICATES}/{path.stem}{suffix}" for suffix in SUFFIXES[CERTIFICATES])
    write_bytes(path, text)
    with contextlib.suppress(UserError, OSError):  # unsigned without a usable key; 'fedloom key' reports why
        from fedloom.server.unlearning.signing import sign  # imported only here: slow

        sign(path, text)


def reissue(ledger: Ledger, request: str) -> None:
    """Write a request's certificate again, if it exists, with the deletions that sites have reported since."""
    path = ledger.folder / CERTIFICATES / f"{request}.json"
    if not path.is_file():
        return
    earlier = read(path)
    issue(ledger, {**earlier, "at_sites": at_sites(ledger, request, earlier["sites"])})


def erased(ledger: Ledger, request: str) -> list[str]:
    """Return the paths in the run's folder that were deleted for a request."""
    events = (each for each in ledger.events("erased") if each.body["request"] == request)
    return list(dict.fromkeys(path for event in events for path in event.body["paths"]))


def sums_of(ledger: Ledger) -> dict[str, ExactSum]:
    """Add up all contributions in the ledger, read one after the other; return the sums by slot."""
    last, bits = ledger.last_round(), ledger.run().bits
    sums = {}
    for row in ledger.sums():
        names = ledger.blobs.get(last.states[row.name]) if last else {}
        sums[row.name] = added_up(row, names, ledger.all_latest().values(), ledger.blobs.get, bits)
    return sums


def one_digest(digests: Mapping[str, str]) -> str:
    """Return one digest for all sums: the digest of the only sum, or a sha256 over all of them."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def rest_digest(ledger: Ledger, totals: Mapping[str, ExactSum]) -> str:
    """Return the digest of the sums of the remaining contributions, or of these contributions if the method sums nothing."""
    return one_digest(
        _digests(totals) if totals else {name: contribution.blob for name, contribution in ledger.all_latest().items()}
    )


def _digests(totals: Mapping[str, ExactSum]) -> dict[str, str]:
    return {name: digest(total.totals) for name, total in totals.items()}


def forgotten_event(ledger: Ledger, request: str) -> Event:
    """Return the ledger's event by which a request was applied. Raises UserError if it is missing."""
    for event in ledger.events("forgotten"):
        if event.body.get("request") == request:
            return event
    raise UserError(f"{ledger.folder}: its ledger has no applied request '{request}'")


def changed(ledger: Ledger) -> list[str]:
    """Return the names of certificates in the run's folder that differ from what the server wrote."""
    requests = dict.fromkeys(event.body["request"] for event in ledger.events(CERTIFIED))
    files = {request: ledger.folder / CERTIFICATES / f"{request}.json" for request in requests}
    return [path.name for request, path in files.items() if path.is_file() and not as_written(path, request, ledger)]


def forged(ledger: Ledger) -> list[str]:
    """Return the names of signatures in the run's folder that are not those of their certificates."""
    from fedloom.server.unlearning.signing import SUFFIX, is_whole  # imported only here: slow

    requests = dict.fromkeys(event.body["request"] for event in ledger.events(CERTIFIED))
    files = [ledger.folder / CERTIFICATES / f"{request}.json" for request in requests]
    there = [path for path in files if path.is_file() and path.with_suffix(SUFFIX).is_file()]
    return [path.with_suffix(SUFFIX).name for path in there if not is_whole(path)]


def as_written(path: Path, request: str, ledger: Ledger) -> bool:
    """Return whether the certificate file is unchanged: the ledger has its sha256 for the request."""
    made = [each.body["sha256"] for each in ledger.events(CERTIFIED) if each.body["request"] == request]
    return file_digest(path) in made


def read(path: Path) -> dict[str, Any]:
    """Return the content of a certificate's file. Raises UserError if it is not valid."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError("not a regular file")
        content = read_json(path.read_text(encoding="utf-8"))
        _check_parts(content, _PARTS)
        _check_parts(content["exact"], _EXACT_PARTS)
        _check_inside(content)
    except FileNotFoundError:
        raise UserError(f"{path}: this certificate does not exist; {_known_in(path.parent)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; {_certificates_in(path)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not a certificate of fedloom ({type(error).__name__}: {error})") from None
    if content["format"] != FORMAT:
        raise UserError(f"{path}: has format {content['format']}, not {FORMAT}; use the fedloom that wrote it")
    return content


def _known_in(folder: Path) -> str:
    """Return a text with the requests whose certificates are in a folder."""
    if folder.name != CERTIFICATES or not folder.parent.is_dir():
        return f"a run has them in {CERTIFICATES}"
    if known := sorted(path.stem for path in folder.glob("*.json")):
        shown = [plain(name) for name in known[:MOST_SHOWN]] + ["..."] * (len(known) > MOST_SHOWN)
        return f"requests of this run that have one: {', '.join(shown)}"
    return "no request of this run has one (`fedloom unlearn` makes a request, `fedloom requests` lists them)"


def _certificates_in(folder: Path) -> str:
    """Return a text with a command line for each certificate in a run's folder, or in its folder of certificates."""
    inside = folder if folder.name == CERTIFICATES else folder / CERTIFICATES
    commands = [shlex.join(["fedloom", "verify", plain(str(path))]) for path in sorted(inside.glob("*.json"))]
    if not commands:
        return "it has no certificates; name a certificate, or a run that has one (`fedloom unlearn` writes them)"
    more = f", or one of {len(commands) - MOST_SHOWN} others" if len(commands) > MOST_SHOWN else ""
    return f"name a certificate in it: {', '.join(f'`{command}`' for command in commands[:MOST_SHOWN])}{more}"


def _check_parts(content: Any, parts: dict[str, type]) -> None:
    """Raise ValueError if a part is missing or has another type."""
    for name, kind in parts.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ValueError(f"'{name}' is missing or has another type")


def _check_inside(content: dict[str, Any]) -> None:
    """Raise ValueError for names that are not texts, and for a malformed 'at_sites' or 'parts'."""
    exact, answers, parts = content["exact"], content.get("at_sites", {}), content.get("parts", {})
    names = [*content["sites"], *content["times"].values(), *exact["tensors"], *exact["remaining"].values()]
    digests = [*exact["digest_before"].values(), *exact["digest_after"].values()]
    if not all(isinstance(text, str) for text in [*names, *digests]):
        raise ValueError("a name, a time or a digest in it is not a text")
    if not isinstance(answers, dict) or not all(text is None or isinstance(text, dict) for text in answers.values()):
        raise ValueError("'at_sites' has another type")
    if not isinstance(parts, dict) or not all(isinstance(text, str) for text in parts.values()):
        raise ValueError("'parts' has another type")


def text_of(content: dict[str, Any]) -> str:
    """Return the JSON text of a certificate's file: the canonical one of RFC 8785."""
    return rfc8785.dumps(content).decode()
