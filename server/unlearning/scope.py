"""What a certificate's measurements looked for, and what nobody looked for: no measurement shows that nothing is left."""

from collections.abc import Mapping
from typing import Any

_NOT_TESTED = (
    "behaviour that the forgotten sites had suppressed in others and that their removal wakes, such as a backdoor under "
    "camouflage (BadFU, Lu et al. 2025): whoever does not know its trigger cannot look for it",
    "attacks fitted to each image (U-LiRA, Hayes et al. 2024): they take many federations trained anew, and find more",
    "what the network before and the one after tell together: whoever has both, and the number of sites, has the sum of "
    "what the forgotten sites gave",
)
_WITHOUT_DISTANCE = "how far the network is from one trained without the sites (--retrain)"
_NOTHING = "the network: what it still says of the sites was not measured"


def scope(evidence: Mapping[str, Any]) -> dict[str, list[str]]:
    """`tested` and `not_tested`, in words, from the evidence of a certificate."""
    after = evidence.get("after", {})
    attacked = [site for site, found in after.get("membership", {}).items() if "not_measured" not in found]
    relearned = [site for site, found in evidence.get("relearning", {}).items() if "not_measured" not in found]
    tested = {
        "accuracy on the test images of every domain": after.get("accuracy"),
        f"membership of the training images of {', '.join(attacked)}, by two attacks that treat all images alike": attacked,
        f"steps to relearn the data of {', '.join(relearned)}": relearned,
        "distance to a network trained without the sites": "retrained" in evidence,
    }
    found = [what for what, done in tested.items() if done]
    lacks = [] if not found or "retrained" in evidence else [_WITHOUT_DISTANCE]
    return {"tested": found, "not_tested": [*([] if found else [_NOTHING]), *lacks, *_NOT_TESTED]}
