"""What a certificate's measurements tested, and what they did not: no measurement shows that nothing is left."""

from collections.abc import Mapping
from typing import Any

from fedloom.server.run_folder.scores import first_metric, headline

_NOT_TESTED = (
    "behaviour that the forgotten sites had suppressed in others and that their removal wakes, such as a camouflaged "
    "backdoor (BadFU, Lu et al. 2025): without its trigger, no test can detect it",
    "attacks fitted to each image (U-LiRA, Hayes et al. 2024): they need many newly trained federations, and detect more",
    "what the networks before and after reveal together: anyone who has both, and the number of sites, can compute the sum "
    "of the forgotten sites' contributions",
)
_WITHOUT_DISTANCE = "how far the network is from one trained without the sites (--retrain)"
_NOTHING = "the network: what it still reveals about the sites was not measured"


def scope(evidence: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what a certificate's evidence has `tested` and `not_tested`, as lists of texts."""
    after = evidence.get("after", {})
    attacked = [site for site, attacks in after.get("membership", {}).items() if "not_measured" not in attacks]
    relearned = [site for site, starts in evidence.get("relearning", {}).items() if "not_measured" not in starts]
    tested = {
        f"{first_metric(after).title} on the test examples of every domain": headline(after),
        f"membership of the training examples of {', '.join(attacked)}, by two attacks, the same for all examples": attacked,
        f"steps to relearn the data of {', '.join(relearned)}": relearned,
        "distance to a network trained without the sites": "retrained" in evidence,
    }
    measured = [name for name, done in tested.items() if done]
    lacks = [] if not measured or "retrained" in evidence else [_WITHOUT_DISTANCE]
    return {"tested": measured, "not_tested": [*([] if measured else [_NOTHING]), *lacks, *_NOT_TESTED]}
