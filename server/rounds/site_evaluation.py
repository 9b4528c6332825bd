"""Federated evaluation: sites measure networks on their own images, and the server needs none of them."""

from collections.abc import Callable
from dataclasses import dataclass

from clients.data import label
from clients.messages import EVALUATE, MODEL
from clients.networks import Model, architecture_of
from clients.replies import ReplyError, check_numbers
from conf.sites import UNION, Site
from server.rounds.questions import Questions

PERSONAL = "personal"  # the display name of the sites' own networks, each measured at its site


@dataclass
class SiteEvaluation:
    """Measures models at the sites of a run, as server.evaluate.Evaluator does at the server."""

    questions: Questions
    sites: Callable[[], list[Site]]
    round: Callable[[], int]

    def accuracy(self, model: Model | None, split: str) -> dict[str, float]:
        """Fraction of right answers for each domain, and `union`: of all sites' images together. None: of each site's own.

        Sites of another architecture than the model's are not asked; those that do not answer do not count.
        """
        right: dict[str, int] = {}
        total: dict[str, int] = {}
        content = {MODEL: model.state} if model else {}
        asked = [site for site in self.sites() if model is None or self._reads(site, model)]
        number = max(1, self.round())
        for reply in self.questions.ask(EVALUATE, number, number, asked, content, split=split):
            try:
                found = check_numbers(reply.content, ["right", "total"]) if reply.content is not None else {}
            except ReplyError:
                continue
            if found and 0 <= found["right"] <= found["total"]:
                domain = label(reply.site.spec)
                right[domain] = right.get(domain, 0) + int(found["right"])
                total[domain] = total.get(domain, 0) + int(found["total"])
        shares = {domain: right[domain] / images for domain, images in sorted(total.items()) if images}
        return {**shares, UNION: sum(right.values()) / sum(total.values())} if shares else {}

    def _reads(self, site: Site, model: Model) -> bool:
        """Whether the site's network is of the model's architecture, and its domain one that the model is read on."""
        same = architecture_of(self.questions.config, site) == model.architecture
        return same and (model.domains is None or label(site.spec) in model.domains)
