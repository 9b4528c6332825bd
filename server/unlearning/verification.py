"""Verify a certificate against the run's ledger, or with the operator's public key alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.protocol.signatures import erased_words, fingerprint, is_signed, signing_payload
from fedloom.clients.storage.states import staged_files
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.fusion.exact import ExactSum
from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import chain_problems, results
from fedloom.server.run_folder.layout import (
    BASELINES,
    BLOBS,
    CERTIFICATES,
    LEDGER,
    METRICS,
    RETRAINED,
    SITES,
    STAGING,
    STATES,
)
from fedloom.server.run_folder.results_schema import LOSS, VALIDATION, sound_metrics
from fedloom.server.run_folder.scores import first_metric, headline
from fedloom.server.unlearning.certificate import (
    OUTSTANDING,
    as_written,
    erased,
    forgotten_event,
    names_of,
    one_digest,
    read,
    rest_digest,
    sums_of,
)
from fedloom.server.unlearning.client_erasure import at_sites
from fedloom.server.unlearning.signing import SUFFIX, is_whole, signed_by

CLOSE = 0.002  # accuracies this close count as equal: another machine may round differently
SAYS = "not checked"  # the verdict for facts that are not compared with anything
_TOLD = 100  # characters of each side of a mismatch


@dataclass(frozen=True)
class Finding:
    """One fact that was compared.

    Attributes:
        what: The fact.
        verdict: "match", "mismatch", "not checkable", OUTSTANDING, or SAYS (the certificate states it; not compared).
        reason: Why the verdict is not "match"; may be empty.
    """

    what: str
    verdict: str
    reason: str = ""


def about(path: Path, request: str = "", sites: Sequence[str] = ()) -> list[Finding]:
    """Return a certificate's request, run, sites and dates, and whether they are as expected.

    `request`: the expected request; empty: the one that the file is named after. `sites`: sites that it must name.
    """
    content = read(path)
    times = ", ".join(f"{kind} {time}" for kind, time in content["times"].items())
    wanted, where = (request, "asked for") if request else (path.stem, "the file's name")
    parts = content.get("parts", {}).values()
    lacking = sorted(set(sites) - {*content["sites"], *parts, *(part.partition("=")[2] for part in parts)})
    findings = [
        _found(f"request '{plain(content['request'])}'", content["request"] == wanted, f"{where}: '{plain(wanted)}'"),
        Finding(f"run {plain(content['run'])}", SAYS),
        _found(f"sites {plain(names_of(content))}", not lacking, f"asked for: {plain(', '.join(lacking))}"),
        Finding(f"dates: {plain(times) or 'none'}", SAYS),
    ]
    return [*findings, *([Finding(f"reason: {plain(content['reason'])}", SAYS)] if content["reason"] else [])]


def verify(path: Path, ledger: Ledger) -> list[Finding]:
    """Compare a certificate with the run's ledger and folder; return all findings. Raises UserError if one is unreadable."""
    content = read(path)
    return [_unchanged(path, content["request"], ledger), *ledger.steady(lambda: list(_findings(content, ledger)))]


def fault_of(ledger: Ledger, request: str) -> str:
    """Return, in one line, what does not match of a request's certificate in the run's folder; empty if all matches."""
    path = ledger.folder / CERTIFICATES / f"{request}.json"
    findings = [unbroken(ledger.folder), *about(path), *verify(path, ledger), *unchecked_signature(path)]
    wrong = [f"{finding.what} ({finding.reason})" for finding in findings if finding.verdict == "mismatch"]
    return (f"Request '{request}': its certificate does not match the run: {'; '.join(wrong)}. Do not rely on it; "
            f"run `fedloom verify {ledger.folder} {request}` for details") if wrong else ""  # fmt: skip


def check_certificates(ledger: Ledger, requests: Iterable[str]) -> None:
    """Raise FailedError if the certificate of one of these requests does not match the run."""
    if fault := next(filter(None, (fault_of(ledger, request) for request in requests)), ""):
        raise FailedError(fault)


def unbroken(path: Path) -> Finding:
    """Return whether the ledger's events follow each other. `fedloom ledger RUN --check` also checks all files."""
    problems = chain_problems(path)
    reason = "; ".join(f"{problem.file}: {problem.what}" for problem in problems)
    return Finding("the ledger's events follow each other", "mismatch" if problems else "match", reason)


def verify_signature(path: Path, key: str) -> list[Finding]:
    """Check a certificate without its run: who signed it, and whether it is consistent."""
    content = read(path)
    findings = [
        _found(
            "signed by this key", signed_by(path, key), "the file was changed, another key signed it, or it is not signed"
        )
    ]
    if not any(content["options"].get(option) for option in ("repair", "restore", "rollback")):
        sums, remaining = bool(content["exact"]["tensors"]), content["exact"]["sum_of_remaining"]
        fact = "the sum after the request is that of the remaining contributions" if sums else "the remaining contributions"
        after = one_digest(content["exact"]["digest_after" if sums else "remaining"])
        findings.append(_compared(fact, after, remaining))
    apart = not set(content["sites"]) & set(content["exact"]["remaining"])
    findings.append(_found("no forgotten site is among the remaining ones", apart, "one is"))
    return [
        *findings,
        *(deleted(content["run"], content["request"], site, answer) for site, answer in content.get("at_sites", {}).items()),
    ]


def unchecked_signature(path: Path) -> list[Finding]:
    """Check a certificate's signature without the operator's key. Return an empty list if it has no signature."""
    if not path.with_suffix(SUFFIX).exists():
        return []
    what = "signature not checked; give --key"
    if is_whole(path):
        return [Finding(what, SAYS, "it fits the key in the file next to the certificate, which proves only consistency")]
    return [
        Finding(what, "mismatch", "it does not fit the key in the file next to the certificate: one of them was changed")
    ]


def deleted(run: str, request: str, site: str, answer: Mapping[str, Any] | None) -> Finding:
    """Return whether a site's `answer` says that it deleted its own store, and whether any signature is valid."""
    fact = f"{plain(site)} says that it deleted its own store"
    if not answer or "signature" not in answer:
        return Finding(fact, "match" if answer else OUTSTANDING)
    try:
        key, signature = str(answer["key"]), bytes.fromhex(str(answer["signature"]))
        about = run, site, answer["files"], answer["bytes"]
    except (KeyError, ValueError):
        return Finding(fact, "mismatch", "the signature cannot be read")
    signed = f"{fact}, signed by {fingerprint(key)[:16]}"
    if is_signed(key, signing_payload(*erased_words(*about, "")), signature):
        return Finding(signed, "not checkable", "an earlier version signed it, without the request's id")
    return _found(
        signed, is_signed(key, signing_payload(*erased_words(*about, request)), signature), "the signature is not valid"
    )


def _unchanged(path: Path, request: str, ledger: Ledger) -> Finding:
    reason = "it was changed: its sha256 differs"
    return _found("the file is unchanged", as_written(path, request, ledger), reason)


def verify_accuracy(path: Path, ledger: Ledger, measure: Callable[[], dict[str, float]]) -> list[Finding]:
    """Compare the certificate's first metric with that of the current network (`measure`), if no round followed."""
    content, last, what = read(path), ledger.last_round(), "accuracy after"
    try:
        after = content["evidence"]["after"]
        stated, what = {name: float(share) for name, share in headline(after).items()}, f"{first_metric(after).title} after"
    except (KeyError, TypeError, ValueError, AttributeError):
        stated = {}
    if not stated or last is None or _digest_now(ledger, sums_of(ledger)) != content["exact"]["sum_of_remaining"]:
        return [Finding(what, "not checkable", "the run has continued, or no accuracy was measured")]
    try:
        measured = measure()
    except UserError as error:
        return [Finding(what, "not checkable", str(error))]
    now = ledger.last_round()
    if now is None or now.digest != last.digest:
        return [Finding(what, "not checkable", "the run has continued meanwhile")]
    return [
        _found(f"{what} on {domain}", abs(measured.get(domain, math.inf) - share) <= CLOSE,
               f"certificate: {share:.4f}, measured: {measured.get(domain, math.nan):.4f}")
        for domain, share in stated.items()
    ]  # fmt: skip


def _findings(content: dict[str, Any], ledger: Ledger) -> Iterator[Finding]:
    yield _compared("run", content["run"], ledger.run().run)
    event = forgotten_event(ledger, content["request"])
    yield _compared("event in the chain", content["ledger"], {"event": event.id, "digest": event.digest})
    yield _compared("sites", content["sites"], event.body["sites"])
    request = ledger.request(content["request"])
    yield _compared("reason", content["reason"], request.reason if request else None)
    yield _compared("who asked", content.get("by", ""), request.by if request else "")
    yield _compared("options", content["options"], request.options if request else None)
    yield _compared("what was deleted", content["erased"], erased(ledger, content["request"]))
    yield _compared("evidence before", content["evidence"].get("before"), event.body["body"]["evidence"])
    yield _compared("digest before", content["exact"]["digest_before"], event.body["body"]["digest_before"])
    yield _compared("digest after, as committed", content["exact"]["digest_after"], event.body["digest"])
    states = ledger.sites()
    back = {site for each in ledger.events("readmitted", after=event.id) for site in each.body["sites"]}
    for site in event.body["sites"]:
        stored = held(ledger, site)
        reason = "it was readmitted since, as the ledger says" if site in back else "it does"
        yield _found(f"{site} does not participate", states.get(site, False), reason)
        yield _found(f"this machine stores nothing of {site}", not stored, f"it has {', '.join(stored)}")
    yield from _networks(ledger)
    yield from _at_sites(content, ledger)
    totals = sums_of(ledger)
    now = _digest_now(ledger, totals)
    summed, fact = rest_digest(ledger, totals), "sum of the remaining contributions" if totals else "remaining contributions"
    if totals:
        yield _compared(f"{fact} now", now, summed)
    trained = any(content["options"].get(option) for option in ("repair", "restore", "rollback"))
    if now == content["exact"]["sum_of_remaining"] or (now == one_digest(content["exact"]["digest_after"]) and not trained):
        yield _compared(f"{fact} then", content["exact"]["sum_of_remaining"], summed)
        blobs = {name: contribution.blob for name, contribution in ledger.all_latest().items()}
        yield _compared("remaining contributions", content["exact"]["remaining"], blobs)
    else:
        yield Finding(f"{fact} then", "not checkable", "the run has continued; its chain is still valid")


def held(ledger: Ledger, site: str) -> list[str]:
    """Return what the run's folder has of a site, as texts; this includes files restored from a copy."""
    items = ["contributions in the ledger"] if ledger.history(site) else []
    if any(site in (record.get(key) or {}) for record in sound_metrics(ledger.folder) for key in (LOSS, VALIDATION)):
        items.append(f"values in {METRICS}")
    paths = [*(ledger.folder / SITES).glob(f"*/{site}"), *staged_files(ledger.folder / STAGING, site),
              ledger.folder / STATES / f"{site}.safetensors"]  # fmt: skip
    runs = [path for kind in (BASELINES, RETRAINED) for path in sorted((ledger.folder / kind).glob("*")) if path.is_dir()]
    paths = [path for path in paths if path.exists()] + [path for path in runs if not _is_without(path, site)]
    items += [str(path.relative_to(ledger.folder)) for path in paths]
    contributed = {event.body["contributions"][site]["blob"] for event in ledger.events("round")
            if site in event.body["contributions"]}  # fmt: skip
    return items + [f"{BLOBS}/{name}" for name in sorted((contributed & ledger.blobs.names()) - ledger.referred())]


def _is_without(folder: Path, site: str) -> bool:
    """Return whether a run inside the run (a baseline, or a retrained network) does not include the site."""
    if not any((folder / name).exists() for name in (LEDGER, BLOBS, STATES)):
        return True  # it ended before its first round
    try:
        with Ledger.open(folder, server=False) as ledger:
            return ledger.sites().get(site, True)
    except LedgerError:
        return False


def _networks(ledger: Ledger) -> Iterator[Finding]:
    """Yield the files of networks that differ from what the run wrote, such as a restored earlier network."""
    known = results(ledger.folder)
    for path in sorted((ledger.folder / STATES).glob("*.safetensors")) if known else ():
        name = str(path.relative_to(ledger.folder))
        if name not in known:
            yield Finding(name, "not checkable", "the run did not write it; its content is unknown")
        elif not known[name]:
            yield Finding(name, "mismatch", "it was changed after the run finished")


def _digest_now(ledger: Ledger, totals: Mapping[str, ExactSum]) -> str:
    """Return the digest that `sum_of_remaining` would have after the last commit."""
    last = ledger.last_round()
    return one_digest(last.digest if last else {}) if totals else rest_digest(ledger, {})


def _at_sites(content: dict[str, Any], ledger: Ledger) -> Iterator[Finding]:
    """Yield, for sites that joined a federation, whether they say that they deleted their stores."""
    for site, answer in at_sites(ledger, content["request"], content["sites"]).items():
        fact = f"{site} says that it deleted its own store"
        if answer is None:
            yield Finding(fact, OUTSTANDING, "its node has been offline since; the next server that runs will ask it")
        elif (stated := content.get("at_sites", {}).get(site)) is None:
            yield Finding(fact, "match", f"since the certificate: {answer['files']} files")
        else:
            yield _compared(fact, stated, answer)


def _found(fact: str, right: bool, reason: str) -> Finding:
    return Finding(fact, "match") if right else Finding(fact, "mismatch", reason)


def _compared(fact: str, certificate: Any, ledger: Any) -> Finding:
    sides = (f"{str(side)[:_TOLD]}{'...' if len(str(side)) > _TOLD else ''}" for side in (certificate, ledger))
    return _found(fact, certificate == ledger, "certificate: {}, ledger: {}".format(*sides))
