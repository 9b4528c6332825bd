"""Federated evaluation: sites measure networks on their own images, so the server needs none."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedloom.clients.data import label
from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.networks import Model, architecture_of
from fedloom.clients.protocol.messages import EVALUATE, RIGHT, measured_record, right_of
from fedloom.clients.protocol.reply_checks import ReplyError, check_score
from fedloom.conf.sites import UNION, Site
from fedloom.fusion.state import State
from fedloom.server.rounds.client_metadata import capped
from fedloom.server.rounds.task_messages import Asking
from fedloom.server.rounds.transport import RoundTransport


@dataclass
class SiteEvaluation:
    """Measures models at a run's sites, as server.evaluation.evaluator.Evaluator does at the server.

    `beside`: returns what the method sends with a question about the sites' own networks, by record name.
    """

    transport: RoundTransport
    sites: Callable[[], list[Site]]
    round: Callable[[], int]
    beside: Callable[[], Mapping[str, State]] = dict

    def accuracies(self, models: Sequence[Model | None], split: str) -> list[dict[str, float]]:
        """Return each model's share of right answers by domain, and `union`: over all sites' images.

        A model of None stands for each site's own network.
        """
        return [self.shares(scores) for scores in self.scores(models, split)]

    def scores(self, models: Sequence[Model | None], split: str) -> list[dict[str, Score]]:
        """Return, for each model, the scores at each site on the site's own images. None stands for each site's own network.

        One question asks about all models that are sent, another about the sites' own networks. A site receives only models
        of its own architecture. Missing and impossible answers do not count.
        """
        results: list[dict[str, Score]] = [{} for _ in models]
        for own in (False, True):
            if indices := [index for index, model in enumerate(models) if (model is None) == own]:
                self._ask(models, indices, split, results, self.beside() if own else {})
        return results

    def _ask(
        self, models: Sequence[Model | None], indices: Sequence[int], split: str, results: list[dict[str, Score]],
        beside: Mapping[str, State],
    ) -> None:  # fmt: skip
        """Ask one question about the models at these indices, and put the answers into `results`."""
        sent = {site.name: [index for index in indices if self._reads(site, models[index])] for site in self.sites()}
        asked = [site for site in self.sites() if sent[site.name]]

        def content(site: Site) -> dict[str, State]:
            chosen = ((index, models[index]) for index in sent[site.name])
            return {**beside, **{measured_record(index): model.state for index, model in chosen if model is not None}}

        number = max(1, self.round())
        for reply in self.transport.question(Asking(EVALUATE, number, number, split), asked, content):
            for index in sent[reply.site.name]:
                name = RIGHT if models[index] is None else right_of(measured_record(index))
                if reply.content is None:
                    continue
                with contextlib.suppress(ReplyError):
                    results[index][reply.site.name] = check_score(reply.content, name)

    def shares(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """Return the share of right answers by domain, and over all images; empty without images.

        In a real federation, a site that reports many more images than the others counts less (client_metadata.capped).
        """
        tally: dict[str, tuple[float, float]] = {}
        reported = {name: score.images for name, score in scores.items() if score.images}
        counted = reported if self.transport.channel.simulated else capped(reported)
        for site in self.sites():
            if site.name in counted:
                score, share = scores[site.name], counted[site.name] / scores[site.name].images
                right, images = tally.get(label(site.spec), (0, 0))
                tally[label(site.spec)] = right + share * score.right, images + counted[site.name]
        shares = {domain: right / images for domain, (right, images) in sorted(tally.items())}
        both = [sum(column) for column in zip(*tally.values(), strict=True)]
        return {**shares, UNION: both[0] / both[1]} if shares else {}

    def _reads(self, site: Site, model: Model | None) -> bool:
        """Return whether the site has the model's architecture, and its domain is one of the model's."""
        if model is None:
            return True
        same = architecture_of(self.transport.config, site) == model.architecture
        return same and (model.domains is None or label(site.spec) in model.domains)
