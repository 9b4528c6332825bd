"""The evidence of a certificate: measurements before and after sites are forgotten, with their numbers of samples."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from fedloom.clients.data import Examples, label, site_examples, task_of, test_images
from fedloom.clients.data.schema import CLASS
from fedloom.clients.networks import Model, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.training.learner import DivergedError
from fedloom.conf.errors import UserError
from fedloom.conf.progress import steps
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import digest
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.run_folder.scores import METRIC, SCORES
from fedloom.server.unlearning.attacks import disagreement, distance, membership, time_to_relearn

MAX_IMAGES = 2000  # images on each side of a membership attack
REGAIN = 0.9  # of the old accuracy
STEPS = 300  # of relearning, at most


class UnlearningEvaluation:
    """Measures what networks reveal about `sites`. If their images are not on this machine, it reports that instead."""

    def __init__(self, config: Config, evaluator: Evaluator, sites: Sequence[str]) -> None:
        self.config, self.evaluator = config, evaluator
        self.sites = [site for site in config.roster if site.name in sites]
        self.task = task_of(config)

    def of(self, model: Model | None) -> dict[str, Any]:
        """Return the network's digest, its metrics by domain and, by site, membership attacks on its training examples."""
        if model is None:
            return {
                "accuracy": {},
                "membership": {},
                "not_measured": "the method has no aggregate: each site has its own network",
            }
        try:
            measured = self.evaluator.metrics.entries(self.evaluator.table(model, "test"))
            first = self.evaluator.metrics.first
            facts = {"name": first.name, "higher_is_better": first.higher_is_better, "share": first.share}
            about = {METRIC: facts} if SCORES in measured else {}
            evidence: dict[str, Any] = {"network": digest(model.state), **measured, **about, "membership": {}}
        except UserError as error:  # the images are the sites' own
            return {"accuracy": {}, "membership": {}, "not_measured": str(error)}
        for site in steps("membership attacks", self.sites):
            evidence["membership"][site.name] = self._attacked(site, model)
        return evidence

    def report(self, before: dict[str, Any], model: Model | None, retrained: Model | None) -> dict[str, Any]:
        """Return a certificate's evidence: `before`, `model` now, time to relearn, and distance to `retrained`."""
        after = self.of(model)
        if model is None or "not_measured" in after:
            return {"before": before, "after": after}
        relearning = self._relearning(before, model)
        evidence = {"samples": self.samples(), "before": before, "after": after, "relearning": relearning}
        if retrained is not None:
            evidence["retrained"] = {**self.of(retrained), "distance": distance(model.state, retrained.state),
                                  "disagreement": self._disagreement(model, retrained)}  # fmt: skip
        return evidence

    def samples(self) -> dict[str, int]:
        """Return the number of test examples of each domain."""
        return {label(spec): len(test_images(self.config, spec)) for spec in self.evaluator.specs.values()}

    def _loaded(self, model: Model, domain: str) -> nn.Module:
        """Return the network in this state, with the head that is used on the domain."""
        return self.evaluator.head_view(self.evaluator.loaded(self.evaluator.with_statistics(model)), domain)

    def _attacked(self, site: Site, model: Model) -> dict[str, Any]:
        try:
            members, others = (_at_most(images, self.config.seed) for images in self._images(site))
            attacks = membership(
                self._loaded(model, label(site.spec)), members, others, seed=self.config.seed, task=self.task
            )
        except UserError as error:
            return {"not_measured": str(error)}
        return {name: asdict(attack) for name, attack in attacks.items()}

    def _relearning(self, before: dict[str, Any], model: Model) -> dict[str, Any]:
        """Return the steps until REGAIN of the old accuracy is back, from this state and from a fresh start."""
        results = {}
        if self.task != CLASS:
            return {site.name: {"not_measured": "the time to relearn is measured for classes only"} for site in self.sites}
        for site in steps("time to relearn", self.sites):
            target = REGAIN * before.get("accuracy", {}).get(label(site.spec), float("nan"))
            fresh = initial_state(self.config) if model.architecture == architecture_of(self.config) else {}
            starts = {"forgotten": model, **({"fresh": replace(model, state=fresh)} if fresh else {})}
            try:
                train, test = self._images(site)
                results[site.name] = {
                    name: asdict(time_to_relearn(self._loaded(start, label(site.spec)), train, test, target,
                                                 self.config.training, seed=self.config.seed, most=STEPS))
                    for name, start in starts.items()
                }  # fmt: skip
            except (UserError, DivergedError) as error:
                results[site.name] = {"not_measured": str(error)}
        return results

    def _disagreement(self, model: Model, other: Model) -> float:
        """Return the share of all domains' test examples that the two networks classify differently."""
        twin = other.architecture.build().to(self.evaluator.device)
        twin.load_state_dict(self.evaluator.with_statistics(other).state)
        apart, total = 0.0, 0
        for domain in self.evaluator.specs:
            images = self.evaluator.images(domain, "test")
            share = disagreement(self._loaded(model, domain), self.evaluator.head_view(twin, domain), images, self.task)
            apart, total = apart + share * len(images), total + len(images)
        return apart / total

    def _images(self, site: Site) -> tuple[Examples, Examples]:
        """Return the site's training examples, and the test examples of its domain."""
        return site_examples(self.config, site), test_images(self.config, site.spec)


def _at_most(images: Examples, seed: int) -> Examples:
    order = torch.randperm(len(images), generator=torch_generator(seed, "membership", "sample"))[:MAX_IMAGES]
    return Examples(images.x[order], images.y[order])
