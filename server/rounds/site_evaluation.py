"""Federated evaluation: sites measure networks on their own images, and the server needs none of them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clients.data import label
from clients.messages import EVALUATE, RIGHT, TOTAL, measured_record, right_of
from clients.networks import Model, architecture_of
from clients.replies import ReplyError, can_be, check_numbers
from conf.sites import UNION, Site
from fusion.exact import State
from server.rounds.questions import Questions

PERSONAL = "personal"  # the display name of the sites' own networks, each measured at its site


@dataclass
class SiteEvaluation:
    """Measures models at the sites of a run, as server.evaluate.Evaluator does at the server.

    `beside`: by record name, what the method sends with the question for sites' own networks.
    """

    questions: Questions
    sites: Callable[[], list[Site]]
    round: Callable[[], int]
    beside: Callable[[], Mapping[str, State]] = dict

    def accuracies(self, models: Sequence[Model | None], split: str) -> list[dict[str, float]]:
        """Of each model the fraction of right answers for each domain, and `union`: of all sites' images together.

        None: of each site's own network. All travel in one question. A site is sent the models of its own architecture;
        what it does not answer does not count.
        """
        tallies = [_Tally() for _ in models]
        sent = {
            site.name: [place for place, model in enumerate(models) if self._reads(site, model)] for site in self.sites()
        }
        asked = [site for site in self.sites() if sent[site.name]]

        beside = self.beside() if None in models else {}

        def content(site: Site) -> dict[str, State]:
            chosen = ((place, models[place]) for place in sent[site.name])
            return {**beside, **{measured_record(place): model.state for place, model in chosen if model is not None}}

        number = max(1, self.round())
        for reply in self.questions.ask(EVALUATE, number, number, asked, content, split=split):
            for place in sent[reply.site.name]:
                name = RIGHT if models[place] is None else right_of(measured_record(place))
                with contextlib.suppress(ReplyError):
                    found = check_numbers(reply.content, [name, TOTAL]) if reply.content is not None else {}
                    tallies[place].add(label(reply.site.spec), found.get(name, 0), found.get(TOTAL, 0))
        return [tally.shares() for tally in tallies]

    def _reads(self, site: Site, model: Model | None) -> bool:
        """Whether the site's network is of the model's architecture, and its domain one that the model is read on."""
        if model is None:
            return True
        same = architecture_of(self.questions.config, site) == model.architecture
        return same and (model.domains is None or label(site.spec) in model.domains)


class _Tally:
    """Right answers and images, by domain."""

    def __init__(self) -> None:
        self._right: dict[str, int] = {}
        self._total: dict[str, int] = {}

    def add(self, domain: str, right: float, total: float) -> None:
        """Count what a site says, if it can be: whole numbers of images, no more of them right than there are."""
        if can_be(right, total):
            self._right[domain] = self._right.get(domain, 0) + int(right)
            self._total[domain] = self._total.get(domain, 0) + int(total)

    def shares(self) -> dict[str, float]:
        """The fraction of right answers for each domain, and of all together; nothing where there are no images."""
        shares = {domain: self._right[domain] / images for domain, images in sorted(self._total.items()) if images}
        return {**shares, UNION: sum(self._right.values()) / sum(self._total.values())} if shares else {}
