"""The readable page of a certificate."""

from pathlib import Path
from typing import Any

from fedloom.server.unlearning.certificate import CERTIFICATES, one_digest, read
from fedloom.sims.report.page import Part, write_page
from fedloom.sims.report.tables import Table, percent


def write_html(path: Path) -> Path:
    """Write CERTIFICATE.html beside CERTIFICATE.json. Raises UserError if that cannot be read."""
    given = read(path)
    evidence = given.get("evidence", {})
    sections: list[tuple[str, list[Part]]] = [
        ("What is exact", [given["exact"]["statement"], _exact(given)]),
        ("What is not exact", [Table("", ["part", "why"], [[part, why] for part, why in given["not_exact"].items()])]),
        (
            "What was deleted",
            [Table("", ["path in the run's folder"], [[one] for one in given["erased"]]), *_at_sites(given)],
        ),
        (
            "What was measured",
            [*_networks(evidence), _accuracy(evidence), _attacks(evidence), _relearning(evidence), *_retrained(evidence)],
        ),
        *([("What was tested, and what was not", [_scope(given["scope"])])] if "scope" in given else []),
    ]
    return write_page(path.with_suffix(".html"), f"Certificate of request {given['request']}", sections)


def write_pages(folder: Path) -> None:
    """Write the pages of a run's certificates that have none, or were written again."""
    for path in sorted((folder / CERTIFICATES).glob("*.json")):
        page = path.with_suffix(".html")
        if not page.exists() or page.stat().st_mtime < path.stat().st_mtime:
            write_html(path)


def _at_sites(given: dict[str, Any]) -> list[Part]:
    """What nodes of a real federation say that they deleted."""
    if not (told := given.get("at_sites")):
        return []
    rows = [[site, f"{done['files']} files, {done['bytes']:,} bytes", done["time"]] if done else [site, "outstanding", ""]
            for site, done in told.items()]  # fmt: skip
    note = (
        "As they say: nobody can see from here what another machine keeps. Outstanding: the node has not been there since."
    )
    return [Table("At the sites themselves", ["site", "deleted", "when"], rows, note)]


def _exact(given: dict[str, Any]) -> Table:
    exact = given["exact"]
    rest = "the sum of the remaining contributions" if exact["tensors"] else "the remaining contributions"
    sums = {"before": exact["digest_before"], "after": exact["digest_after"]} if exact["tensors"] else {}
    rows = [
        ["sites", ", ".join(given["sites"])],
        ["run", given["run"]],
        ["reason", given["reason"] or "-"],
        ["options", ", ".join(f"{name} {value}" for name, value in given["options"].items() if value) or "-"],
        *([f"request {state}", when] for state, when in given["times"].items()),
        *([["tensors", f"{len(exact['tensors'])}: {', '.join(exact['tensors'])}"]] if exact["tensors"] else []),
        *([f"digest of the sum {when}", one_digest(digests)] for when, digests in sums.items()),
        [f"digest of {rest}", exact["sum_of_remaining"]],
        ["remaining sites", str(len(exact["remaining"]))],
        ["event of the ledger", f"{given['ledger']['event']}: {given['ledger']['digest']}"],
    ]
    return Table("", ["what", "value"], rows)


def _scope(scope: dict[str, list[str]]) -> Table:
    rows = [[what.replace("_", " "), one] for what in ("tested", "not_tested") for one in scope[what]]
    return Table("", ["", "what"], rows)


def _stages(evidence: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage: evidence[stage] for stage in ("before", "after", "retrained") if evidence.get(stage)}


def _networks(evidence: dict[str, Any]) -> list[Part]:
    """Which networks were measured."""
    rows = [[stage, one["network"]] for stage, one in _stages(evidence).items() if "network" in one]
    note = "Equal digests are equal networks, bit for bit."
    return [Table("The networks that were measured", ["network", "digest"], rows, note)] if rows else []


def _accuracy(evidence: dict[str, Any]) -> Table:
    stages = _stages(evidence)
    domains = list(dict.fromkeys(name for one in stages.values() for name in one.get("accuracy", {})))
    rows = [[domain, evidence.get("samples", {}).get(domain, "all"),
             *(percent(one["accuracy"][domain]) if domain in one["accuracy"] else "-" for one in stages.values())]
            for domain in domains]  # fmt: skip
    note = "An accuracy on a forgotten domain below that of a network retrained without the site is a trace, too."
    return Table("Test accuracy", ["domain", "test images", *stages], rows, note)


def _attacks(evidence: dict[str, Any]) -> Table:
    rows = []
    for stage, one in _stages(evidence).items():
        for site, attacks in one.get("membership", {}).items():
            if "not_measured" in attacks:
                rows.append([site, stage, "-", attacks["not_measured"], "-"])
                continue
            rows += [[site, stage, name, f"{each['auc']:.3f} ({each['low']:.3f} to {each['high']:.3f})",
                      f"{each['members']} / {each['others']}"] for name, each in sorted(attacks.items())]  # fmt: skip
    note = ("Area under the curve of telling a site's training images from test images of its domain, with a 95 % bootstrap "
            "interval; 0.5 is chance. Near 0.5 after means little unless it was clearly higher before.")  # fmt: skip
    return Table("Membership inference", ["site", "network", "attack", "AUC", "members / others"], rows, note)


def _relearning(evidence: dict[str, Any]) -> Table:
    rows = []
    for site, starts in evidence.get("relearning", {}).items():
        if "not_measured" in starts:
            rows.append([site, "-", starts["not_measured"], "-"])
            continue
        rows += [[site, start, one["steps"] if one["steps"] is not None else "not reached", percent(one["target"])]
                 for start, one in starts.items()]  # fmt: skip
    note = "Steps of SGD on the site's images until 90 % of the old accuracy on its domain is back; fresh: untrained."
    return Table("Time to relearn", ["site", "start", "steps", "target"], rows, note)


def _retrained(evidence: dict[str, Any]) -> list[Part]:
    """How far the network is from one that was trained without the sites, if there is one."""
    if not (one := evidence.get("retrained")):
        return []
    rows = [[f"{name} distance of the weights", f"{value:.4g}"] for name, value in one["distance"].items()]
    rows.append(["test images put into different classes", percent(one["disagreement"])])
    return [Table("Beside a network retrained without the sites", ["what", "value"], rows)]
