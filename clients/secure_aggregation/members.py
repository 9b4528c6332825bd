"""With how many sites, and with how many that it knows, a site lets its contribution be summed: its own policy decides.

The server names the sites of a round. If it may name two, one of which is its own, a sum hides nothing.
"""

from collections.abc import Collection

from clients.policy import Policy
from conf.errors import UserError

ALWAYS, USUALLY = 2, 3  # fewest members of a sum: whatever a policy says, and where it knows no keys and says nothing


def fewest(policy: Policy) -> int:
    """Of how many sites a sum must be: `min_members`, or more than half of those whose keys the site knows."""
    if policy.min_members is not None:
        return max(ALWAYS, policy.min_members)
    known = len(policy.identity.known())
    return max(ALWAYS, known // 2 + 1) if known else USUALLY


def check_members(policy: Policy, names: Collection[str]) -> None:
    """UserError if a sum over these sites is over too few, or over too few whose keys this site knows."""
    needed = fewest(policy)
    if len(names) < needed:
        raise UserError(f"secure aggregation: a sum over {len(names)} sites; this site takes part in sums over {needed} "
                        "or more (site.yaml: min_members)")  # fmt: skip
    default = needed if policy.masks else 0
    known = len(set(names) & policy.identity.known().keys())
    if known < (wanted := default if policy.min_known is None else policy.min_known):
        raise UserError(f"secure aggregation: this site knows the keys of {known} of the sites, and wants to know {wanted} "
                        "(site.yaml: peers, min_known)")  # fmt: skip
