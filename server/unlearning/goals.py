"""How a certificate meets the five goals that Nguyen et al. 2025 (VeriFUL) ask of verifiable federated unlearning.

For each goal: what is proven, what is measured, what is not claimed, and who can check it.
"""

from collections.abc import Mapping
from typing import Any

PARTS = ("proven", "measured", "not_claimed", "who_can_check")
ANYONE = "anyone with the proof (fedloom proof)"
SITES = "the site that left, and each site that stays, from the chain of events and with its own key (verify.py --site)"
HOLDER = "anyone who has the run's folder (fedloom verify)"
NOTHING = "nothing"


def goals(content: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the PARTS of each goal for a certificate with its evidence, by the goal's name."""
    exact, times = content["exact"], content["times"]
    summed = bool(exact["tensors"])
    gone = ("The sum after the request is, bit for bit, that of the remaining contributions." if summed
            else "The site's contributions are deleted; the remaining ones are listed by their sha256.")  # fmt: skip
    return {
        "completeness": _goal(
            gone, _attacks(content), "that networks trained with the site have no trace of it (see What is not exact)",
            f"{ANYONE}: the events; {HOLDER}: the sums",
        ),
        "timeliness": _goal(
            f"Received {times.get('received', '-')}, applied {times.get('applied', '-')}; the chain fixes their order.",
            NOTHING, "that the server's clock is right; no time stamp of a third party is included", ANYONE,
        ),
        "correctness": _goal(
            "One event of the chain removes these sites for this request. The chain has the certificate's sha256.",
            NOTHING, "that the server has no copy outside the run's folder", ANYONE,
        ),
        "exclusivity": _goal(
            "The event changes the contributions of the forgotten sites alone; all others have the same sha256 after it.",
            _accuracy(content), "that the accuracy on other sites' data is unchanged", f"{ANYONE}; {SITES}",
        ),
        "reversibility": _goal(
            "The run continues from an exact sum. A readmission is an event of its own, and starts without the old "
            "contribution.", NOTHING, "that the contribution can be restored: it is deleted", f"{ANYONE}; {HOLDER}",
        ),
    }  # fmt: skip


def _goal(*parts: str) -> dict[str, str]:
    return dict(zip(PARTS, parts, strict=True))


def _attacks(content: Mapping[str, Any]) -> str:
    """Return the AUC of membership inference after the request, with its interval, for each site and attack."""
    after = content.get("evidence", {}).get("after", {}).get("membership", {})
    words = [f"{name} on {site}: AUC {each['auc']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
             for site, attacks in after.items() if "not_measured" not in attacks
             for name, each in sorted(attacks.items())]  # fmt: skip
    return (
        f"Membership inference after the request, with 95% intervals (0.5 is chance): {'; '.join(words)}"
        if words
        else NOTHING
    )


def _accuracy(content: Mapping[str, Any]) -> str:
    evidence = content.get("evidence", {})
    return "The test results on each domain before and after (see What was measured)" if evidence.get("after") else NOTHING
