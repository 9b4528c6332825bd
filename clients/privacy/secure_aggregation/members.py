"""How many sites, and how many known sites, a sum must have: decided by the site's own policy.

The server names the sites of a round. If it could name two, and control one of them, a sum would hide nothing.
"""

from collections.abc import Collection

from fedloom.clients.data import label
from fedloom.clients.job import Job
from fedloom.clients.networks import network_text
from fedloom.clients.privacy.policy import Policy
from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

ALWAYS, USUALLY = 2, 3  # fewest members of a sum: always, and by default for a site that knows no keys


def fewest(policy: Policy) -> int:
    """Return how many sites a sum must have before this site joins it.

    That is the policy's `min_members`; without it, over half of the sites whose keys it knows, or 3 if it knows none.
    """
    if policy.min_members is not None:
        return max(ALWAYS, policy.min_members)
    known = len(policy.identity.known())
    return max(ALWAYS, known // 2 + 1) if known else USUALLY


def check_alike(job: Job, names: Collection[str]) -> None:
    """Raise UserError unless the configuration has these sites train the same network in the same way.

    Otherwise the server could know what the others send: their network is dead, or their classes have separate
    outputs.
    """
    wanted, own = set(names), bool(job.policy.domain)
    mine = _manner(job.config, job.site, own)
    sites = [site for site in job.config.roster if site.name in wanted]
    if odd := sorted(site.name for site in sites if _manner(job.config, site, own) != mine):
        raise UserError(f"secure aggregation: {odd[0]} has another network or other outputs than this site, or changes its "
                        "images differently; configure all sites of a masked sum equally, or do not use masks")  # fmt: skip


def _manner(config: Config, site: Site, own: bool) -> tuple[object, ...]:
    """Return what a site's training depends on besides its own images, and their number unless the domain is its `own`."""
    spec = site.spec
    outputs = () if config.data.heads == "shared" else (label(spec), spec.domain)
    number = () if own else (spec.samples, spec.total, spec.partition, site.parts)
    return network_text(config, site), outputs, spec.rotation, spec.invert, spec.flip, spec.classes, spec.relabel, *number


def check_members(policy: Policy, names: Collection[str]) -> None:
    """Raise UserError if these sites of a sum are too few, or if this site knows the keys of too few of them."""
    needed = fewest(policy)
    if len(names) < needed:
        raise UserError(f"secure aggregation: a sum over {count(len(names), 'site')}; this site participates in sums "
                        f"over {needed} or more (site.yaml: min_members)")  # fmt: skip
    default = needed if policy.masks else 0
    known = len(set(names) & policy.identity.known().keys())
    if known < (wanted := default if policy.min_known is None else policy.min_known):
        raise UserError(f"secure aggregation: this site knows the keys of {known} of the sites, but requires {wanted} "
                        "(site.yaml: peers, min_known)")  # fmt: skip
