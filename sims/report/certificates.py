"""Write a certificate as an HTML page."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.conf.metrics import ACCURACY
from fedloom.server.run_folder.scores import first_metric, headline
from fedloom.server.unlearning.certificate import CERTIFICATES, TIMES, names_of, one_digest, read
from fedloom.server.unlearning.goals import PARTS
from fedloom.sims.report.page import Part, page_text, write_page
from fedloom.sims.report.tables import Table, percent, when

FURTHER = ("repair", "restore", "rollback")  # options with rounds of training after the subtraction


def write_html(path: Path) -> Path:
    """Write an HTML page next to the certificate `path` (JSON); return its path. Raise UserError if it cannot be read."""
    certificate = read(path)
    return write_page(path.with_suffix(".html"), title(certificate), sections(certificate))


def title(certificate: dict[str, Any]) -> str:
    """Return the title of a certificate's page."""
    return f"Certificate of request {certificate['request']}"


def sections(certificate: dict[str, Any]) -> list[tuple[str, list[Part]]]:
    """Return the parts of a certificate's page, by heading. Raise UserError if a part is missing or has another type."""
    try:
        parts = _sections(certificate)
        page_text(title(certificate), parts)  # now, since only this looks at the entries of tables
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the certificate of request '{certificate['request']}' was changed: a part of it is missing or has "
                        f"another type ({type(error).__name__}); restore it from a copy of the run") from None  # fmt: skip
    return parts


def _sections(certificate: dict[str, Any]) -> list[tuple[str, list[Part]]]:
    evidence = certificate.get("evidence", {})
    erased = Table("", ["path in the run's folder"], [[name] for name in certificate["erased"]])
    return [
        ("", [_lead(certificate)]),
        ("What is exact", [certificate["exact"]["statement"], *_restored(certificate["options"]), _exact(certificate)]),
        ("What is not exact", [Table("", ["part", "why"], [[part, why] for part, why in certificate["not_exact"].items()])]),
        ("What was deleted", [erased, *_at_sites(certificate)]),
        (
            "What was measured",
            [*_networks(evidence), _accuracy(evidence), _attacks(evidence), _relearning(evidence), *_retrained(evidence)],
        ),
        *([("How to read the measurements", _readings(certificate["readings"]))] if certificate.get("readings") else []),
        *([("What was tested, and what was not", [_scope(certificate["scope"])])] if "scope" in certificate else []),
        *([("The goals of verifiable unlearning", [_goals(certificate["goals"])])] if "goals" in certificate else []),
    ]


def _lead(certificate: dict[str, Any]) -> str:
    """Return the outcome, who asked for it, and when."""
    from fedloom.server.unlearning.readings import outcome  # imported only here: reports do not need it

    times, by = certificate["times"], certificate.get("by")
    found = outcome(certificate, names_of(certificate), advice=False)
    asked = f"Requested{f' by {by}' if by else ''} on {when(times.get('received', ''))}"
    return f"Outcome: {found}. {asked}, applied on {when(times.get('applied', ''))} (UTC)."


def _restored(options: dict[str, Any]) -> list[Part]:
    """Return a text on what a restoration did after the subtraction."""
    if not (rounds := options.get("restore")):
        return []
    return [f"After the subtraction, the network moved back by {percent(float(options.get('back', 0.5)))} of the way to its "
            f"initial state, and the remaining sites trained it as one network for {count(int(rounds), 'round')}. Their "
            "contributions now include these rounds; the forgotten sites took no part."]  # fmt: skip


def write_pages(folder: Path) -> None:
    """Write the HTML pages of a run's new and changed certificates. Leave out damaged ones, which checks report."""
    for path in sorted((folder / CERTIFICATES).glob("*.json")):
        page, written = path.with_suffix(".html"), path.stat().st_mtime_ns
        if not page.exists() or page.stat().st_mtime_ns != written:  # equal, since a clock can be set back
            with suppress(UserError):
                os.utime(write_html(path), ns=(written, written))


def _at_sites(certificate: dict[str, Any]) -> list[Part]:
    """Return what the nodes of a real federation report as deleted."""
    if not (reports := certificate.get("at_sites")):
        return []
    rows = [[site, f"{done['files']} files, {done['bytes']:,} bytes", done["time"]] if done else [site, "outstanding", ""]
            for site, done in reports.items()]  # fmt: skip
    note = (
        "As reported by the sites: the server cannot check another machine's disk. Outstanding: the site has not connected "
        "since the request."
    )
    return [Table("Deleted at the sites", ["site", "deleted", "when"], rows, note)]


def _exact(certificate: dict[str, Any]) -> Table:
    exact = certificate["exact"]
    rest = "the sum of the remaining contributions" if exact["tensors"] else "the remaining contributions"
    later = any(certificate["options"].get(name) for name in FURTHER)  # rounds, in which contributions change
    sums = {"before": exact["digest_before"], "after": exact["digest_after"]} if exact["tensors"] else {}
    rows = [
        ["sites", names_of(certificate)],
        ["run", certificate["run"]],
        ["reason", certificate["reason"] or "-"],
        *([["asked by", str(certificate["by"])]] if certificate.get("by") else []),
        ["options", ", ".join(f"{name} {value}" for name, value in certificate["options"].items() if value) or "-"],
        *([f"request {state} (UTC)", when(certificate["times"].get(state, ""))] for state in TIMES),
        *([["tensors", f"{len(exact['tensors'])}: {', '.join(exact['tensors'])}"]] if exact["tensors"] else []),
        *([f"digest of the sum {when}", one_digest(digests)] for when, digests in sums.items()),
        [f"digest of {rest}{', after the further rounds' if later else ''}", exact["sum_of_remaining"]],
        ["remaining sites", str(len(exact["remaining"]))],
        ["event of the ledger", f"{certificate['ledger']['event']}: {certificate['ledger']['digest']}"],
    ]
    return Table("", ["what", "value"], rows)


def _readings(readings: dict[str, Any]) -> list[Part]:
    """Return whether the measurements show that the network has forgotten, and how to read each."""
    from fedloom.server.unlearning.readings import LINES, SHOWN, STILL  # imported only here: reports do not need it

    verdict = {
        "yes": "The measurements that detected the sites before the request do not detect them after it.",
        "no": f"The network has not forgotten: {'; '.join(readings[STILL])}.",
    }.get(readings[SHOWN], "Nothing of the sites was detectable before the request, so the measurements cannot show more.")
    return [verdict, Table("", ["measurement"], [[line] for line in readings[LINES]])]


def _scope(scope: dict[str, list[str]]) -> Table:
    rows = [[what.replace("_", " "), entry] for what in ("tested", "not_tested") for entry in scope[what]]
    return Table("", ["", "what"], rows)


def _goals(goals: dict[str, dict[str, str]]) -> Table:
    rows = [[goal, *(parts[part] for part in PARTS)] for goal, parts in goals.items()]
    note = "The goals are those of Nguyen et al. 2025 (VeriFUL)."
    return Table("", ["goal", *(part.replace("_", " ") for part in PARTS)], rows, note)


def _stages(evidence: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage: evidence[stage] for stage in ("before", "after", "retrained") if evidence.get(stage)}


def _networks(evidence: dict[str, Any]) -> list[Part]:
    """Return the digests of the measured networks."""
    rows = [[stage, measured["network"]] for stage, measured in _stages(evidence).items() if "network" in measured]
    note = "Networks with equal digests are bit-identical."
    return [Table("Measured networks", ["network", "digest"], rows, note)] if rows else []


def _accuracy(evidence: dict[str, Any]) -> Table:
    stages = _stages(evidence)
    metric = next((first_metric(stage) for stage in stages.values() if headline(stage)), first_metric({}))
    domains = list(dict.fromkeys(name for stage in stages.values() for name in headline(stage)))
    rows = [[domain, evidence.get("samples", {}).get(domain, "all"),
             *(metric.text(headline(stage).get(domain)) for stage in stages.values())] for domain in domains]  # fmt: skip
    an, worse = "An" if metric.name == ACCURACY else "A", "below" if metric.higher_is_better else "above"
    retrained = "that of a network retrained without the site is also a trace of the site."
    if "retrained" not in stages:
        retrained += " No network was retrained to compare with (--retrain)."
    note = f"{an} {metric.title} on a forgotten domain {worse} {retrained}"
    return Table(f"Test {metric.title}", ["domain", "test examples", *stages], rows, note)


def _attacks(evidence: dict[str, Any]) -> Table:
    rows = []
    for stage, measured in _stages(evidence).items():
        for site, attacks in measured.get("membership", {}).items():
            if "not_measured" in attacks:
                rows.append([site, stage, "-", attacks["not_measured"], "-"])
                continue
            rows += [[site, stage, name, f"{each['auc']:.3f} ({each['low']:.3f} to {each['high']:.3f})",
                      f"{each['members']} / {each['others']}"] for name, each in sorted(attacks.items())]  # fmt: skip
    note = ("AUC: how well an attack separates a site's training examples from test examples of its domain; 0.5 is chance. "
            "In brackets: 95% bootstrap interval. A value near 0.5 after forgetting is evidence only if the value before "
            "was clearly higher.")  # fmt: skip
    return Table("Membership inference", ["site", "network", "attack", "AUC", "members / others"], rows, note)


def _relearning(evidence: dict[str, Any]) -> Table:
    rows = []
    for site, starts in evidence.get("relearning", {}).items():
        if "not_measured" in starts:
            rows.append([site, "-", starts["not_measured"], "-"])
            continue
        rows += [[site, start, result["steps"] if result["steps"] is not None else "not reached", percent(result["target"])]
                 for start, result in starts.items()]  # fmt: skip
    note = "SGD steps on the site's examples until the network has 90% of the old accuracy on its domain; fresh: untrained."
    return Table("Time to relearn", ["site", "start", "steps", "target accuracy"], rows, note)


def _retrained(evidence: dict[str, Any]) -> list[Part]:
    """Return the distance to a network that was retrained without the sites, if there is one."""
    if not (comparison := evidence.get("retrained")):
        return []
    rows = [[f"{name} distance of the weights", f"{value:.4g}"] for name, value in comparison["distance"].items()]
    rows.append(["test examples with different predicted classes", percent(comparison["disagreement"])])
    return [Table("Compared with a network retrained without the sites", ["what", "value"], rows)]
