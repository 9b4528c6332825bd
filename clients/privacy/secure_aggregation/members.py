"""With how many sites, and with how many that it knows, a site lets its contribution be summed: its own policy decides.

The server names the sites of a round. If it may name two, one of which is its own, a sum hides nothing.
"""

from collections.abc import Collection

from fedloom.clients.data import label
from fedloom.clients.job import Job
from fedloom.clients.networks import network_text
from fedloom.clients.privacy.policy import Policy
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

ALWAYS, USUALLY = 2, 3  # fewest members of a sum: whatever a policy says, and where it knows no keys and says nothing


def fewest(policy: Policy) -> int:
    """Of how many sites a sum must be: `min_members`, or more than half of those whose keys the site knows."""
    if policy.min_members is not None:
        return max(ALWAYS, policy.min_members)
    known = len(policy.identity.known())
    return max(ALWAYS, known // 2 + 1) if known else USUALLY


def check_alike(job: Job, names: Collection[str]) -> None:
    """UserError unless these sites train the same network in the same way, by the configuration that all of them have.

    Otherwise the server may know what the others give: their network is dead, or their classes have outputs of their own.
    """
    wanted, own = set(names), bool(job.policy.domain)
    mine = _manner(job.config, job.site, own)
    sites = [site for site in job.config.roster if site.name in wanted]
    if odd := sorted(site.name for site in sites if _manner(job.config, site, own) != mine):
        raise UserError(f"secure aggregation: {odd[0]} has another network or other outputs than this site, or changes its "
                        "images otherwise; give all sites of a masked sum the same, or leave out the masks")  # fmt: skip


def _manner(config: Config, site: Site, own: bool) -> tuple[object, ...]:
    """What a site's training depends on beside its own images; and how many it has, unless they are its `own` affair."""
    spec = site.spec
    outputs = () if config.data.heads == "shared" else (label(spec), spec.domain)
    number = () if own else (spec.samples, spec.partition, site.parts)
    return network_text(config, site), outputs, spec.rotation, spec.invert, spec.flip, spec.classes, spec.relabel, *number


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
