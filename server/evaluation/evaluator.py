"""Accuracy of networks on every domain of the experiment, and on the union of all domains."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.clients.data import (
    Examples,
    domain_specs,
    label,
    outputs,
    own_examples,
    site_sizes,
    test_images,
    to_float,
    validation_images,
    value_of,
)
from fedloom.clients.data.standardise import Standardisation
from fedloom.clients.evaluation.accuracy import Score, count_right, pieces, score
from fedloom.clients.evaluation.metrics import Metrics, Scores, Sums, blocks_of, metrics_of
from fedloom.clients.networks import Architecture, HeadView, Model, Network, Reused, architecture_of
from fedloom.clients.training.torch_setup import pick_device
from fedloom.conf import machine
from fedloom.conf.errors import UserError, plain
from fedloom.conf.metrics import ACCURACY
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION, Site

RECOMPUTED = "recomputed"


class Evaluator:
    """Measures models on the server's own images.

    `split` is "validation" or "test". Only validation examples may guide a choice.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = pick_device("cpu" if config.engine.device == "cpu" else "auto")
        self.specs = domain_specs(config)
        self._instances: dict[Architecture, Reused] = {}
        self._images: dict[tuple[str, str], Examples] = {}
        self.standardisation: Callable[[], Standardisation | None] = lambda: None

    def standardising(self, by: Callable[[], Standardisation | None]) -> "Evaluator":
        """Return an evaluator with the same networks and images, which standardises by what `by` returns."""
        other = copy.copy(self)
        other.standardisation = by
        return other

    def inputs(self, x: Tensor) -> Tensor:
        """Return inputs of the data, on any device, as networks take them: floats, standardised as the run says."""
        by = self.standardisation()
        return to_float(x) if by is None else by.of_inputs(x)

    @property
    def network(self) -> Network:
        """The network of the configuration, with the weights last loaded into it."""
        return self.instance(architecture_of(self.config))

    def instance(self, architecture: Architecture) -> Network:
        """Return the only network of this architecture, in evaluation mode. Models are loaded into it."""
        return self._reused(architecture).network

    def _reused(self, architecture: Architecture) -> Reused:
        if architecture not in self._instances:
            self._instances[architecture] = Reused(architecture.build().to(self.device).eval())
        return self._instances[architecture]

    def loaded(self, model: Model) -> Network:
        """Load the model's weights into its architecture's only network, and return that.

        Raises:
            UserError: The weights belong to another network.
        """
        message = f"strategy '{self.config.strategy['name']}': its models() must hold fedloom.server.strategies.Model"
        if not isinstance(model, Model):
            raise UserError(f"{message}, one is a {type(model).__name__}")
        network = self._reused(model.architecture).as_new()
        try:
            network.load_state_dict(model.state)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(plain(str(error)).split())[:300]
            raise UserError(f"{message} with the state of its architecture ({reason})") from None
        return network

    def head_view(self, network: nn.Module, domain: str) -> nn.Module:
        """Return the network in evaluation mode: only this domain's outputs, BatchNorm as in `evaluation.statistics`."""
        outs = outputs(self.config, self.specs[domain])
        return HeadView(network, outs, self.config.evaluation.statistics, self.standardisation()).eval()

    def accuracy(self, model: Model, split: str) -> dict[str, float]:
        """Return the accuracy on each of the model's domains (0 to 1), and `union`: on all their images together."""
        return self.measure(split, network=self.loaded(model), domains=model.domains)

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The configured metrics."""
        return metrics_of(self.config)

    def table(self, model: Model, split: str) -> Scores:
        """Return the model's value of each metric on each of its domains, and `union`; the first metric comes first."""
        if self.metrics.only_accuracy:
            return {ACCURACY: self.accuracy(model, split)}
        return self._table(split, 0, self.loaded(model), model.domains)

    def headline(self, split: str, most: int = 0, network: Network | None = None) -> dict[str, float]:
        """Return the first metric's value of a network on each domain, and `union`; arguments as in `measure`."""
        if self.metrics.only_accuracy:
            return self.measure(split, most, network)
        return self._table(split, most, network or self.network, None).get(self.metrics.first.name, {})

    def _table(self, split: str, most: int, network: Network, domains: Sequence[str] | None) -> Scores:
        parts: dict[str, Sums] = {}
        with all_cores(self.config.engine.threads):
            self._recompute(network, domains)
            for domain in self.specs if domains is None else domains:
                images = self.images(domain, split)
                chosen = Examples(images.x[:most], images.y[:most]) if most else images
                if len(chosen):
                    view = self.head_view(network, domain)
                    parts[domain] = score(view, chosen, self.config.evaluation.batch, self.device, self.metrics).sums
        return self.metrics.table(parts, blocks_of(self.config))

    def measure(
        self, split: str, most: int = 0, network: Network | None = None, domains: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Return the accuracy of a network on each domain (0 to 1), and `union`.

        Args:
            split: "validation" or "test".
            most: Images of each domain to use, at most. 0: all.
            network: The network with its current weights. None: `self.network`.
            domains: Labels of the domains to use. None: all.
        """
        right, total, shares, network = 0, 0, {}, network or self.network
        with all_cores(self.config.engine.threads):
            self._recompute(network, domains)
            for domain in self.specs if domains is None else domains:
                images = self.images(domain, split)
                if most:
                    images = Examples(images.x[:most], images.y[:most])
                if not len(images):  # a small domain may have no validation examples
                    continue
                view = self.head_view(network, domain)
                hits = count_right(view, images, self.config.evaluation.batch, self.device)
                right, total = right + hits, total + len(images)
                shares[domain] = hits / len(images)
        return {**shares, UNION: right / total} if total else {}

    def at_sites(self, model: Model, sites: Sequence[Site]) -> dict[str, Score]:
        """Return the model's score on each site's own test examples, by site. Sites without test examples are missing."""
        network, scores = self.loaded(model), dict[str, Score]()
        with all_cores(self.config.engine.threads):
            for site in sites:
                if images := own_examples(self.config, site, "test"):
                    view = self.head_view(network, label(site.spec))
                    scores[site.name] = score(view, images, self.config.evaluation.batch, self.device, self.metrics)
        return scores

    def with_statistics(self, model: Model) -> Model:
        """Return the model in the form in which it is measured.

        With evaluation.statistics=recomputed, it has new BatchNorm statistics; otherwise it is unchanged.
        """
        if self.config.evaluation.statistics != RECOMPUTED:
            return model
        network = self.loaded(model)
        self._recompute(network, model.domains)
        return replace(model, state={name: tensor.cpu().clone() for name, tensor in network.state_dict().items()})

    def _recompute(self, network: Network, domains: Sequence[str] | None) -> None:
        """Recompute BatchNorm's statistics, if configured, as means over batches of validation examples.

        Every domain has the same weight.

        Raises:
            UserError: The domains have no validation examples.
        """
        if self.config.evaluation.statistics != RECOMPUTED:
            return
        from fedloom.fusion.cla_ot.repair import recompute_statistics  # slow to import

        parts = [self.images(domain, "validation").x for domain in (self.specs if domains is None else domains)]
        fewest = min((len(part) for part in parts if len(part)), default=0)
        if not fewest:
            raise UserError(f"evaluation.statistics={RECOMPUTED} needs validation examples; set data.validation above 0")
        mixed = torch.stack([part[:fewest] for part in parts if len(part)], dim=1).flatten(0, 1)
        batches = mixed.tensor_split(pieces(len(mixed), self.config.evaluation.batch))
        recompute_statistics(network, [self.inputs(batch.to(self.device)) for batch in batches])

    def images(self, domain: str, split: str) -> Examples:
        """Return a domain's images of a split in random order, so that each batch is a random sample."""
        if (domain, split) not in self._images:
            loader = {"validation": validation_images, "test": test_images}[split]
            images = loader(self.config, self.specs[domain])
            order = torch.randperm(len(images), generator=torch_generator(self.config.seed, domain, split, "order"))
            self._images[domain, split] = Examples(images.x[order], images.y[order])
        return self._images[domain, split]


def has_data(config: Config) -> bool:
    """Return whether this machine needs the sites' data. Sites of a real federation may measure for themselves."""
    return config.engine.name != "flower" or config.evaluation.where == "server"


def site_rows(config: Config) -> list[dict[str, object]]:
    """Return the entry `sites` of summary.json: each site's name, domain (its label) and number of training examples.

    Sites that divide a table by a column also have `part`, "COLUMN=VALUE".
    """
    known = has_data(config)
    sizes = site_sizes(config) if known else ["at the site"] * len(config.roster)
    parts = [value_of(config, site) if known else "" for site in config.roster]
    rows = zip(config.roster, sizes, parts, strict=True)
    return [{"name": site.name, "domain": label(site.spec), "samples": size, **({"part": part} if part else {})}
            for site, size, part in rows]  # fmt: skip


@contextlib.contextmanager
def all_cores(afterwards: int) -> Iterator[None]:
    """Let torch use every core within the context, and `afterwards` threads after it."""
    torch.set_num_threads(machine.threads(machine.cores()))
    try:
        yield
    finally:
        torch.set_num_threads(machine.threads(afterwards))
