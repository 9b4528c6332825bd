"""Verify a certificate against the run's ledger, or with the operator's public key alone."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.protocol.signatures import erased_words, fingerprint, is_signed, signing_payload
from fedloom.conf.errors import UserError, plain
from fedloom.fusion.exact import ExactSum
from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import results
from fedloom.server.run_folder.layout import BASELINES, BLOBS, RETRAINED, SITES, STAGING, STATES
from fedloom.server.unlearning.certificate import (
    OUTSTANDING,
    as_written,
    erased,
    forgotten_event,
    one_digest,
    read,
    rest_digest,
    sums_of,
)
from fedloom.server.unlearning.client_erasure import at_sites
from fedloom.server.unlearning.signing import signed_by

CLOSE = 0.002  # accuracies this close count as equal: another machine may round differently
SAYS = "says"  # the verdict for facts that are not compared with anything
_TOLD = 100  # characters of each side of a mismatch


@dataclass(frozen=True)
class Finding:
    """One compared fact. `verdict`: match, mismatch, not checkable, or says (not compared); `told`: why."""

    what: str
    verdict: str
    told: str = ""


def about(path: Path, request: str = "", sites: Sequence[str] = ()) -> list[Finding]:
    """Return what a certificate is about, and whether that is what the caller asks for.

    `request`: the expected request; empty: the one that the file is named after. `sites`: sites that it must name.
    """
    given = read(path)
    times = ", ".join(f"{kind} {time}" for kind, time in given["times"].items())
    wanted, where = (request, "asked for") if request else (path.stem, "the file's name")
    lacking = sorted(set(sites) - set(given["sites"]))
    found = [
        _found(f"request '{plain(given['request'])}'", given["request"] == wanted, f"{where}: '{plain(wanted)}'"),
        Finding(f"run {plain(given['run'])}", SAYS),
        _found(
            f"sites {plain(', '.join(map(str, given['sites'])))}", not lacking, f"asked for: {plain(', '.join(lacking))}"
        ),
        Finding(f"dates: {plain(times) or 'none'}", SAYS),
    ]
    return [*found, *([Finding(f"reason: {plain(given['reason'])}", SAYS)] if given["reason"] else [])]


def verify(path: Path, ledger: Ledger) -> list[Finding]:
    """Compare a certificate with the run's ledger and folder. Raises UserError if either cannot be read."""
    given = read(path)
    return [_unchanged(path, given["request"], ledger), *ledger.steady(lambda: list(_findings(given, ledger)))]


def verify_signature(path: Path, key: str) -> list[Finding]:
    """Check a certificate without its run: who signed it, and whether it is consistent."""
    given = read(path)
    found = [
        _found(
            "signed by this key", signed_by(path, key), "the file was changed, another key signed it, or it is not signed"
        )
    ]
    if not any(given["options"].get(option) for option in ("repair", "rollback")):
        sums, remaining = bool(given["exact"]["tensors"]), given["exact"]["sum_of_remaining"]
        what = "the sum after the request is that of the remaining contributions" if sums else "the remaining contributions"
        after = one_digest(given["exact"]["digest_after" if sums else "remaining"])
        found.append(_compared(what, after, remaining))
    apart = not set(given["sites"]) & set(given["exact"]["remaining"])
    found.append(_found("no forgotten site is among the remaining ones", apart, "one is"))
    return [
        *found,
        *(deleted(given["run"], given["request"], site, told) for site, told in given.get("at_sites", {}).items()),
    ]


def deleted(run: str, request: str, site: str, told: Mapping[str, Any] | None) -> Finding:
    """Return what a site says about deleting its own store, and whether its signature holds, if it has one."""
    what = f"{plain(site)} says that it deleted its own store"
    if not told or "signature" not in told:
        return Finding(what, "match" if told else OUTSTANDING)
    try:
        key, signature = str(told["key"]), bytes.fromhex(str(told["signature"]))
        about = run, site, told["files"], told["bytes"]
    except (KeyError, ValueError):
        return Finding(what, "mismatch", "the signature cannot be read")
    signed = f"{what}, signed by {fingerprint(key)[:16]}"
    if is_signed(key, signing_payload(*erased_words(*about, "")), signature):
        return Finding(signed, "not checkable", "an earlier version signed it, without the request's id")
    return _found(
        signed, is_signed(key, signing_payload(*erased_words(*about, request)), signature), "the signature is not valid"
    )


def _unchanged(path: Path, request: str, ledger: Ledger) -> Finding:
    reason = "it was changed: its sha256 differs"
    return _found("the file is unchanged", as_written(path, request, ledger), reason)


def verify_accuracy(path: Path, ledger: Ledger, measure: Callable[[], dict[str, float]]) -> list[Finding]:
    """Compare the accuracies after the request with those of the current network (`measure`), if the run has not
    continued.
    """
    given, last = read(path), ledger.last_round()
    try:
        stated = {name: float(share) for name, share in given["evidence"]["after"]["accuracy"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        stated = {}
    if not stated or last is None or _digest_now(ledger, sums_of(ledger)) != given["exact"]["sum_of_remaining"]:
        return [Finding("accuracy after", "not checkable", "the run has continued, or no accuracy was measured")]
    try:
        found = measure()
    except UserError as error:
        return [Finding("accuracy after", "not checkable", str(error))]
    now = ledger.last_round()
    if now is None or now.digest != last.digest:
        return [Finding("accuracy after", "not checkable", "the run has continued meanwhile")]
    return [
        _found(f"accuracy after on {domain}", abs(found.get(domain, math.inf) - share) <= CLOSE,
               f"certificate: {share:.4f}, measured: {found.get(domain, math.nan):.4f}")
        for domain, share in stated.items()
    ]  # fmt: skip


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
    states = ledger.sites()
    back = {site for each in ledger.events("readmitted", after=event.id) for site in each.body["sites"]}
    for site in event.body["sites"]:
        held = _held(ledger, site)
        reason = "it was readmitted since, as the ledger says" if site in back else "it does"
        yield _found(f"{site} does not participate", states.get(site, False), reason)
        yield _found(f"this machine stores nothing of {site}", not held, f"it has {', '.join(held)}")
    yield from _networks(ledger)
    yield from _at_sites(given, ledger)
    totals = sums_of(ledger)
    now = _digest_now(ledger, totals)
    summed, what = rest_digest(ledger, totals), "sum of the remaining contributions" if totals else "remaining contributions"
    if totals:
        yield _compared(f"{what} now", now, summed)
    trained = any(given["options"].get(option) for option in ("repair", "rollback"))
    if now == given["exact"]["sum_of_remaining"] or (now == one_digest(given["exact"]["digest_after"]) and not trained):
        yield _compared(f"{what} then", given["exact"]["sum_of_remaining"], summed)
        here = {name: one.blob for name, one in ledger.all_latest().items()}
        yield _compared("remaining contributions", given["exact"]["remaining"], here)
    else:
        yield Finding(f"{what} then", "not checkable", "the run has continued; its chain is still valid")


def _held(ledger: Ledger, site: str) -> list[str]:
    """Return what the run's folder has of a site, as texts; this includes files restored from a copy."""
    found = ["contributions in the ledger"] if ledger.history(site) else []
    places = [*(ledger.folder / SITES).glob(f"*/{site}"), ledger.folder / STAGING / site,
              ledger.folder / STATES / f"{site}.safetensors"]  # fmt: skip
    runs = [path for kind in (BASELINES, RETRAINED) for path in sorted((ledger.folder / kind).glob("*")) if path.is_dir()]
    places = [path for path in places if path.exists()] + [path for path in runs if not _is_without(path, site)]
    found += [str(path.relative_to(ledger.folder)) for path in places]
    gave = {event.body["contributions"][site]["blob"] for event in ledger.events("round")
            if site in event.body["contributions"]}  # fmt: skip
    return found + [f"{BLOBS}/{name}" for name in sorted((gave & ledger.blobs.names()) - ledger.referred())]


def _is_without(folder: Path, site: str) -> bool:
    """Return whether a run inside the run (a baseline, or a retrained network) does not include the site."""
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


def _at_sites(given: dict[str, Any], ledger: Ledger) -> Iterator[Finding]:
    """Yield, for sites that joined a federation, whether they say that they deleted their stores."""
    for site, told in at_sites(ledger, given["request"], given["sites"]).items():
        what = f"{site} says that it deleted its own store"
        if told is None:
            yield Finding(what, OUTSTANDING, "its node has been offline since; the next server that runs will ask it")
        elif (stated := given.get("at_sites", {}).get(site)) is None:
            yield Finding(what, "match", f"since the certificate: {told['files']} files")
        else:
            yield _compared(what, stated, told)


def _found(what: str, right: bool, told: str) -> Finding:
    return Finding(what, "match") if right else Finding(what, "mismatch", told)


def _compared(what: str, given: Any, found: Any) -> Finding:
    told = (f"{str(one)[:_TOLD]}{'...' if len(str(one)) > _TOLD else ''}" for one in (given, found))
    return _found(what, given == found, "certificate: {}, ledger: {}".format(*told))
