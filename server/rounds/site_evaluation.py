"""Federated evaluation: sites measure networks on their own images, so the server needs none."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import RecordDict

from fedloom.clients.data import label, outputs
from fedloom.clients.data.forms import schema_of
from fedloom.clients.data.schema import NEXT
from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.evaluation.metrics import Metrics, Scores, Sums, blocks_of, metrics_of
from fedloom.clients.networks import Model, architecture_of
from fedloom.clients.protocol.failures import UNTRAINED
from fedloom.clients.protocol.messages import EVALUATE, RIGHT, SUMS, measured_record, right_of
from fedloom.clients.protocol.reply_checks import ReplyError, check_score
from fedloom.conf.errors import plain
from fedloom.conf.metrics import ACCURACY, CLASS
from fedloom.conf.sites import UNION, Site
from fedloom.fusion.state import State
from fedloom.server.rounds.client_metadata import capped
from fedloom.server.rounds.task_messages import Asking
from fedloom.server.rounds.transport import MOST_REASON, RoundTransport

HIDDEN, SILENT = "hidden sums", "no scores"
SITES = "sites"  # evaluation.where: each site measures on its own data


@dataclass
class SiteEvaluation:
    """Measures models at a run's sites, as server.evaluation.evaluator.Evaluator does at the server.

    `beside`: returns what the method sends with a question about the sites' own networks, by record name.
    """

    transport: RoundTransport
    sites: Callable[[], list[Site]]
    round: Callable[[], int]
    beside: Callable[[], Mapping[str, State]] = dict
    _reported: list[str] = field(default_factory=list)  # what was reported once

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

        number, silent = max(1, self.round()), dict[str, str]()
        for reply in self.transport.question(Asking(EVALUATE, number, number, split), asked, content):
            for index in sent[reply.site.name]:
                name = RIGHT if models[index] is None else right_of(measured_record(index))
                if reply.content is None:
                    silent |= {} if UNTRAINED in reply.reason else {reply.site.name: reply.reason}
                    continue
                try:
                    results[index][reply.site.name] = self._checked(reply.site, reply.content, name)
                except ReplyError as error:
                    self._report_left_out(reply.site.name, str(error))
        self._report_silent(silent, len(asked))

    def _report_silent(self, silent: Mapping[str, str], asked: int) -> None:
        """Report once that sites send no scores, why, and what to do if their policies hide them."""
        if not silent or SILENT in self._reported:
            return
        self._reported.append(SILENT)
        name, reason = next(iter(silent.items()))
        where = self.transport.config.evaluation.where
        hint = ". Under masks or noise, a site hides its scores unless its owner allows them (site.yaml: disclose: [scores])"
        hint += "; evaluation.where=server measures on the server's own data" if where == SITES else ""
        refused = reason.startswith("RefusedError") and not self.transport.channel.simulated
        self.transport.message(f"evaluation.where={where}: {len(silent)} of {asked} sites send no scores "
                               f"({name}: {plain(reason)[:MOST_REASON]}){hint if refused else ''}")  # fmt: skip

    def _checked(self, site: Site, content: RecordDict, name: str) -> Score:
        """Return the score that a reply reports under `name`, with its sums. Raises ReplyError for an impossible one."""
        score = check_score(content, name)
        if self.metrics.only_accuracy:
            return score
        from fedloom.clients.protocol.sum_checks import agree, check_sums  # imported only where it is used

        head = outputs(self.transport.config, site.spec)
        record = SUMS + name.removeprefix(RIGHT)
        schema = schema_of(self.transport.config, site.spec)
        steps = schema.shape[0] if schema.task == NEXT else 1
        sums = check_sums(content, record, self.metrics, score.images, head.stop - head.start, steps)
        if self.metrics.kind == CLASS and not agree(sums, score.right, score.images):
            raise ReplyError(f"record '{record}': its sums do not have the reply's right answers")
        return replace(score, sums=sums)

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The configured metrics."""
        return metrics_of(self.transport.config)

    def by_site(self, scores: Mapping[str, Score]) -> dict[str, dict[str, float]]:
        """Return each metric's value by site."""
        if self.metrics.only_accuracy:
            return {name: {ACCURACY: score.right / score.images} for name, score in scores.items() if score.images}
        return {name: self.metrics.values(score.sums) for name, score in scores.items() if score.images}

    def table(self, scores: Mapping[str, Score]) -> Scores:
        """Return each metric's value by domain, and `union`, from the scores at sites."""
        if self.metrics.only_accuracy:
            return {ACCURACY: self.shares(scores)}
        from fedloom.clients.evaluation.metrics.sums import weighted  # imported only where it is used

        parts: dict[str, list[Sums]] = {}
        counted = self._counted(scores)
        for site in self.sites():
            if site.name in counted:
                score = scores[site.name]
                sums = weighted(score.sums, counted[site.name] / score.images)
                parts.setdefault(label(site.spec), []).append(sums)
                self._report_hidden(site.name, sums)
        summed = {domain: self.metrics.added(parts[domain]) for domain in sorted(parts)}
        return self.metrics.table(summed, blocks_of(self.transport.config))

    def _report_hidden(self, site: str, sums: Sums) -> None:
        """Report once that a site does not send all sums, so that some metrics cannot be measured."""
        missing = [each.facts.name for each in self.metrics.chosen if not set(each.formula.needs) <= sums.keys()]
        if missing and HIDDEN not in self._reported:
            self._reported.append(HIDDEN)
            self.transport.message(
                f"{site} does not disclose sums by class, so {', '.join(missing)} cannot be measured. "
                "Its owner can allow them (site.yaml: disclose: classes); accuracy needs only totals."
            )

    def _report_left_out(self, site: str, reason: str) -> None:
        """Report once for each site that its scores do not count."""
        if f"{site}: left out" not in self._reported:
            self._reported.append(f"{site}: left out")
            self.transport.message(f"{site}: its scores do not count in the metrics: {reason}")

    def _counted(self, scores: Mapping[str, Score]) -> Mapping[str, float]:
        """Return how many images of each site count. In a real federation, a site that reports many more images than the
        others counts less (client_metadata.capped).
        """
        reported = {name: score.images for name, score in scores.items() if score.images}
        return reported if self.transport.channel.simulated else capped(reported)

    def shares(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """Return the share of right answers by domain, and over all images (`_counted`); empty without images."""
        tally: dict[str, tuple[float, float]] = {}
        counted = self._counted(scores)
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
