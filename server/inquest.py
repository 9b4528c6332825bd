"""What is measured before and after sites are forgotten: the evidence of a certificate, each with its number of samples."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from clients.data import Images, label, num_classes, site_images, test_images
from clients.initial import initial_state
from clients.learner import DivergedError
from clients.networks import Network, build_network
from clients.randomness import torch_generator
from conf.errors import UserError
from conf.schema import Config
from conf.sites import Site, roster
from fusion.exact import State
from server.evaluate import Evaluator
from server.evidence import disagreement, distance, membership, time_to_relearn

MOST = 2000  # images on each side of a membership attack
REGAIN = 0.9  # of the old accuracy
STEPS = 300  # of relearning, at most


class Inquest:
    """Measures networks as to some sites. Where their images are not on this machine, it says so instead."""

    def __init__(self, config: Config, evaluator: Evaluator, sites: Sequence[str]) -> None:
        self.config, self.evaluator = config, evaluator
        self.sites = [site for site in roster(config) if site.name in sites]
        self.network: Network = build_network(config, num_classes(config)).to(evaluator.device).eval()

    def of(self, state: State) -> dict[str, Any]:
        """Test accuracy on every domain and, for each of the sites, membership attacks on its training images."""
        found: dict[str, Any] = {"accuracy": self.evaluator.accuracy(state, "test"), "membership": {}}
        for site in self.sites:
            found["membership"][site.name] = self._attacked(site, state)
        return found

    def report(self, before: dict[str, Any], state: State, retrained: State | None) -> dict[str, Any]:
        """The evidence: before and after, the time to relearn, and the distance to a network retrained without the sites."""
        after = self.of(state)
        found = {"samples": self.samples(), "before": before, "after": after, "relearning": self._relearning(before, state)}
        if retrained is not None:
            found["retrained"] = {**self.of(retrained), "distance": distance(state, retrained),
                                  "disagreement": self._disagreement(state, retrained)}  # fmt: skip
        return found

    def samples(self) -> dict[str, int]:
        """Numbers of test images by domain."""
        return {label(spec): len(test_images(self.config, spec)) for spec in self.evaluator.specs.values()}

    def _loaded(self, state: State, domain: str) -> nn.Module:
        """The network in this state, as it is measured on a domain."""
        self.network.load_state_dict(self.evaluator.settled(state))
        return self.evaluator.reading(self.network, domain)

    def _attacked(self, site: Site, state: State) -> dict[str, Any]:
        try:
            members, others = (_at_most(images, self.config.seed) for images in self._images(site))
            attacks = membership(self._loaded(state, label(site.spec)), members, others, seed=self.config.seed)
        except UserError as error:
            return {"not_measured": str(error)}
        return {name: asdict(attack) for name, attack in attacks.items()}

    def _relearning(self, before: dict[str, Any], state: State) -> dict[str, Any]:
        """Steps until REGAIN of the old accuracy on a site's domain is back, from here and from a fresh start."""
        found = {}
        for site in self.sites:
            target = REGAIN * before.get("accuracy", {}).get(label(site.spec), float("nan"))
            starts = {"forgotten": state, "fresh": initial_state(self.config)}
            try:
                train, test = self._images(site)
                found[site.name] = {
                    name: asdict(time_to_relearn(self._loaded(start, label(site.spec)), train, test, target,
                                                 self.config.training, seed=self.config.seed, most=STEPS))
                    for name, start in starts.items()
                }  # fmt: skip
            except (UserError, DivergedError) as error:
                found[site.name] = {"not_measured": str(error)}
        return found

    def _disagreement(self, one: State, other: State) -> float:
        """Share of all domains' test images that two networks put into different classes."""
        twin = build_network(self.config, num_classes(self.config)).to(self.evaluator.device)
        twin.load_state_dict(self.evaluator.settled(other))
        apart, total = 0.0, 0
        for domain in self.evaluator.specs:
            images = self.evaluator.images(domain, "test")
            share = disagreement(self._loaded(one, domain), self.evaluator.reading(twin, domain), images)
            apart, total = apart + share * len(images), total + len(images)
        return apart / total

    def _images(self, site: Site) -> tuple[Images, Images]:
        """What the site trained on, and test images of its domain."""
        return site_images(self.config, site), test_images(self.config, site.spec)


def _at_most(images: Images, seed: int) -> Images:
    order = torch.randperm(len(images), generator=torch_generator(seed, "membership", "sample"))[:MOST]
    return Images(images.x[order], images.y[order])
