"""The certificate of a request: what is exact and how that was checked, what is not, and what was measured.

It claims no more than that. `verify` recomputes what can be recomputed.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.identity import erased_words, fingerprint, is_signed, said
from clients.states import write_bytes
from conf.errors import UserError
from fusion.exact import ExactSum, digest
from server.ledger import Ledger, Request
from server.ledger.blobs import LedgerError, file_digest
from server.ledger.sums import added_up
from server.ledger.tables import Event
from server.rounds.aggregation import Aggregation
from server.unlearning.at_sites import at_sites
from server.unlearning.signing import sign, signed_by

CERTIFICATES, FORMAT = "certificates", 1
CERTIFIED = "certified"  # an event of the ledger, with the sha256 of the certificate that is written then
TIMES = ("received", "applied")  # events of a request that a certificate dates
OUTSTANDING = "outstanding"
CLOSE = 0.002  # accuracies this far apart are equal: another machine may round another way
EXACT = ("The sum after the request equals, bit for bit, the sum of the remaining sites' contributions. Nothing of the "
         "forgotten sites' contributions is in it, and their weights are deleted from the ledger. What its events still say "
         "of them stands below, among what is not exact.")  # fmt: skip
_PARTS = {"format": int, "request": str, "run": str, "sites": list, "reason": str, "options": dict, "times": dict,
          "exact": dict, "not_exact": dict, "erased": list, "ledger": dict, "evidence": dict}  # fmt: skip
_EXACT_PARTS = {"statement": str, "tensors": list, "digest_before": dict, "digest_after": dict, "sum_of_remaining": str,
          "remaining": dict}  # fmt: skip
_TOLD = 100  # characters of each side of a mismatch
EVENTS = ("they keep the round, the number of samples and the sha256 of each forgotten contribution, and what this "
          "certificate says: an event's digest covers them, and every later digest that one, so that without them the chain "
          "could not be checked. No weight follows from a sha256, but it proves of a copy, if there is one, that it was "
          "given")  # fmt: skip
MASKED = ("the sites' contributions came under masks: the server never read one alone, and what it kept of the forgotten "
          "sites looked drawn at random. By this request it has learnt more: it has the sum before and the one after, whose "
          "difference is what the forgotten sites gave plus the sum of the other sites' updates of the round in which they "
          "left. It is that alone if the others do not move in that round")  # fmt: skip
COPIES = "backups, other machines and whoever received earlier sums are beyond this server's reach"


def certificate(ledger: Ledger, aggregation: Aggregation, request: Request) -> dict[str, Any]:
    """The facts of an applied request, the evidence left to the caller. Raises UserError if a sum does not check."""
    event = forgotten_event(ledger, request.id)
    remaining = ledger.all_latest()
    totals = check_sums(ledger)
    return {
        "format": FORMAT,
        "request": request.id,
        "run": ledger.run().run,
        "sites": list(request.sites),
        "reason": request.reason,
        "options": request.options,
        "times": {kind: each.time for kind in TIMES for each in ledger.events(kind) if each.body["id"] == request.id},
        "exact": {
            "statement": EXACT,
            "tensors": sorted({name for total in totals.values() for name in total.totals}),
            "digest_before": event.body["body"]["digest_before"],
            "digest_after": event.body["digest"],
            "sum_of_remaining": one_digest(_digests(totals)),
            "remaining": {name: one.blob for name, one in remaining.items()},
        },
        "not_exact": {
            **{one.where: one.why for one in aggregation.residue(request.sites)},
            **({"masks": MASKED} if aggregation.config.federation.secure_aggregation else {}),
            "events of the ledger": EVENTS,
            "copies": COPIES,
        },
        "erased": erased(ledger, request.id),
        "at_sites": at_sites(ledger, request.id, request.sites),
        "ledger": {"event": event.id, "digest": event.digest},
    }


def check_sums(ledger: Ledger) -> dict[str, ExactSum]:
    """The sums of all contributions, read again, by slot. LedgerError if one is not that which is kept."""
    last, totals = ledger.last_round(), sums_of(ledger)
    if last is None or any(digest(total.totals) != last.digest.get(slot) for slot, total in totals.items()):
        raise LedgerError(f"{ledger.folder}: the sum is not that of the contributions, so nothing is subtracted or erased "
                          f"('fedloom ledger {ledger.folder} --check' says more)")  # fmt: skip
    return totals


def issue(ledger: Ledger, content: dict[str, Any]) -> None:
    """Write a certificate into the run's folder; the ledger keeps its sha256. Signed, unless there is no key to be had."""
    text = text_of(content).encode()
    path = ledger.folder / CERTIFICATES / f"{content['request']}.json"
    ledger.note(CERTIFIED, {"request": content["request"], "sha256": hashlib.sha256(text).hexdigest()})
    write_bytes(path, text)
    with contextlib.suppress(UserError, OSError):  # 'fedloom key' says what is wrong; nothing is kept back for that
        sign(path, text)


def reissue(ledger: Ledger, request: str) -> None:
    """Write a request's certificate again, if there is one, with what sites have deleted since."""
    path = ledger.folder / CERTIFICATES / f"{request}.json"
    if not path.is_file():
        return
    given = read(path)
    issue(ledger, {**given, "at_sites": at_sites(ledger, request, given["sites"])})


def erased(ledger: Ledger, request: str) -> list[str]:
    """The paths in the run's folder that were deleted for a request."""
    events = (each for each in ledger.events("erased") if each.body["request"] == request)
    return list(dict.fromkeys(path for event in events for path in event.body["paths"]))


def sums_of(ledger: Ledger) -> dict[str, ExactSum]:
    """The sums of all contributions in the ledger, by slot, read one after the other."""
    last, bits = ledger.last_round(), ledger.run().bits
    found = {}
    for row in ledger.sums():
        names = ledger.blobs.get(last.states[row.name]) if last else {}
        found[row.name] = added_up(row, names, ledger.all_latest().values(), ledger.blobs.get, bits)
    return found


def one_digest(digests: Mapping[str, str]) -> str:
    """The digest of all sums: that of the one there is, or the sha256 of all of theirs."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _digests(totals: Mapping[str, ExactSum]) -> dict[str, str]:
    return {name: digest(total.totals) for name, total in totals.items()}


def forgotten_event(ledger: Ledger, request: str) -> Event:
    """The event by which a request was applied. Raises UserError if there is none."""
    for event in ledger.events("forgotten"):
        if event.body.get("request") == request:
            return event
    raise UserError(f"{ledger.folder}: its ledger has no applied request '{request}'")


@dataclass(frozen=True)
class Finding:
    """One thing that was compared: match, mismatch, or why it could not be."""

    what: str
    verdict: str
    told: str = ""


def verify(path: Path, ledger: Ledger) -> list[Finding]:
    """Compare a certificate with the run's ledger and folder. Raises UserError if either cannot be read."""
    given = read(path)
    return [_as_written(path, given["request"], ledger), *ledger.steady(lambda: list(_findings(given, ledger)))]


def verify_signature(path: Path, key: str) -> list[Finding]:
    """What can be checked of a certificate without its run: who signed it, and that it agrees with itself."""
    given = read(path)
    found = [_found("signed by this key", signed_by(path, key), "the file was changed, or another key signed it, or none")]
    if not any(given["options"].get(option) for option in ("repair", "rollback")):
        after, remaining = one_digest(given["exact"]["digest_after"]), given["exact"]["sum_of_remaining"]
        found.append(_compared("the sum after the request is that of the remaining contributions", after, remaining))
    apart = not set(given["sites"]) & set(given["exact"]["remaining"])
    found.append(_found("no forgotten site is among the remaining", apart, "one is"))
    return [*found, *(_deleted(given["run"], site, told) for site, told in given.get("at_sites", {}).items())]


def _deleted(run: str, site: str, told: Mapping[str, Any] | None) -> Finding:
    """What a site says of its own store, with its signature if it gave one."""
    what = f"{site} says that it deleted its own store"
    if not told or "signature" not in told:
        return Finding(what, "match" if told else OUTSTANDING)
    try:
        words = said(*erased_words(run, site, told["files"], told["bytes"]))
        good = is_signed(str(told["key"]), words, bytes.fromhex(str(told["signature"])))
    except (KeyError, ValueError):
        good = False
    return _found(f"{what}, signed by {fingerprint(str(told.get('key')))[:16]}", good, "the signature does not hold")


def changed(ledger: Ledger) -> list[str]:
    """The certificates in the run's folder that are not, byte by byte, what the server wrote."""
    requests = dict.fromkeys(event.body["request"] for event in ledger.events(CERTIFIED))
    files = {request: ledger.folder / CERTIFICATES / f"{request}.json" for request in requests}
    return [path.name for request, path in files.items() if path.is_file() and not _written(path, request, ledger)]


def _written(path: Path, request: str, ledger: Ledger) -> bool:
    """Whether the file is one that the server wrote, byte by byte: the ledger has its sha256."""
    made = [each.body["sha256"] for each in ledger.events(CERTIFIED) if each.body["request"] == request]
    return file_digest(path) in made


def _as_written(path: Path, request: str, ledger: Ledger) -> Finding:
    told = "it was changed: its sha256 is another one"
    return _found("the file, as it was written", _written(path, request, ledger), told)


def verify_accuracy(path: Path, ledger: Ledger, measure: Callable[[], dict[str, float]]) -> list[Finding]:
    """Compare the accuracies after the request with those of the network as it is now (`measure`), if nothing followed."""
    given, last = read(path), ledger.last_round()
    try:
        stated = {name: float(share) for name, share in given["evidence"]["after"]["accuracy"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        stated = {}
    if not stated or last is None or one_digest(last.digest) != given["exact"]["sum_of_remaining"]:
        return [Finding("accuracy after", "not checkable", "the run went on, or none was measured")]
    try:
        found = measure()
    except UserError as error:
        return [Finding("accuracy after", "not checkable", str(error))]
    now = ledger.last_round()
    if now is None or now.digest != last.digest:
        return [Finding("accuracy after", "not checkable", "the run went on meanwhile")]
    return [
        _found(f"accuracy after on {domain}", abs(found.get(domain, math.inf) - share) <= CLOSE,
               f"certificate: {share:.4f}, measured: {found.get(domain, math.nan):.4f}")
        for domain, share in stated.items()
    ]  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """A certificate. Raises UserError if the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = _checked(found, _PARTS)
        _checked(whole["exact"], _EXACT_PARTS)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such certificate; a run's are in its folder {CERTIFICATES}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no certificate of fedloom ({type(error).__name__}: {error})") from None
    if whole["format"] != FORMAT:
        raise UserError(f"{path}: has format {whole['format']}, not {FORMAT}; use the fedloom that wrote it")
    return whole


def _checked(given: Any, parts: dict[str, type]) -> dict[str, Any]:
    """The same. ValueError if it lacks a part, or one is of another type."""
    for name, kind in parts.items():
        if not isinstance(given, dict) or not isinstance(given.get(name), kind):
            raise ValueError(f"it has no '{name}', or one of another type")
    return given


def _findings(given: dict[str, Any], ledger: Ledger) -> Iterator[Finding]:
    yield _compared("run", given["run"], ledger.run().run)
    event = forgotten_event(ledger, given["request"])
    yield _compared("event in the chain", given["ledger"], {"event": event.id, "digest": event.digest})
    yield _compared("sites", given["sites"], event.body["sites"])
    request = ledger.request(given["request"])
    yield _compared("reason", given["reason"], request.reason if request else None)
    yield _compared("options", given["options"], request.options if request else None)
    yield _compared("what was deleted", given["erased"], erased(ledger, given["request"]))
    yield _compared("evidence before", given["evidence"].get("before"), event.body["body"]["evidence"])
    yield _compared("digest before", given["exact"]["digest_before"], event.body["body"]["digest_before"])
    yield _compared("digest after, as committed", given["exact"]["digest_after"], event.body["digest"])
    states, last = ledger.sites(), ledger.last_round()
    back = {site for each in ledger.events("readmitted", after=event.id) for site in each.body["sites"]}
    for site in event.body["sites"]:
        held = ledger.history(site) or list((ledger.folder / "sites").glob(f"*/{site}"))
        told = "it was readmitted since, as the ledger says" if site in back else "it does"
        yield _found(f"{site} takes no part", states.get(site, False), told)
        yield _found(f"nothing is kept of {site} here", not held, "contributions or its store are there")
    yield from _at_sites(given, ledger)
    now = one_digest(last.digest if last else {})
    summed = one_digest(_digests(sums_of(ledger)))
    yield _compared("sum of the remaining contributions now", now, summed)
    trained = any(given["options"].get(option) for option in ("repair", "rollback"))
    if now == given["exact"]["sum_of_remaining"] or (now == one_digest(given["exact"]["digest_after"]) and not trained):
        yield _compared("sum of the remaining contributions then", given["exact"]["sum_of_remaining"], summed)
        here = {name: one.blob for name, one in ledger.all_latest().items()}
        yield _compared("remaining contributions", given["exact"]["remaining"], here)
    else:
        yield Finding("sum of the remaining contributions then", "not checkable", "the run went on; its chain still holds")


def _at_sites(given: dict[str, Any], ledger: Ledger) -> Iterator[Finding]:
    """Of sites that joined a federation: whether they have deleted what they kept, as they say."""
    for site, told in at_sites(ledger, given["request"], given["sites"]).items():
        what = f"{site} says that it deleted its own store"
        if told is None:
            yield Finding(what, OUTSTANDING, "its node has not been there since; the next server that runs tells it")
        elif (stated := given.get("at_sites", {}).get(site)) is None:
            yield Finding(what, "match", f"since the certificate: {told['files']} files")
        else:
            yield _compared(what, stated, told)


def _found(what: str, right: bool, told: str) -> Finding:
    return Finding(what, "match") if right else Finding(what, "mismatch", told)


def _compared(what: str, given: Any, found: Any) -> Finding:
    told = (f"{str(one)[:_TOLD]}{'...' if len(str(one)) > _TOLD else ''}" for one in (given, found))
    return _found(what, given == found, "certificate: {}, ledger: {}".format(*told))


def text_of(content: dict[str, Any]) -> str:
    """As it is written."""
    return json.dumps(content, indent=1)
