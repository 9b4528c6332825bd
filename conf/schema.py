"""The configuration of an experiment as frozen dataclasses. Each field has its default, range and meaning."""

import functools
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site, SiteConfig, roster
from fedloom.conf.typed import option

MOST_ROUNDS = 999_999
NAMED = "a name, or a section of keys with a name"


@dataclass(frozen=True)
class RunConfig:
    """The folder of a run."""

    name: str = option("", "name of the run's folder in run.root; empty: the experiment's name")
    root: str = option("runs", "folder of all runs", path=True)
    overwrite: bool = option(False, "replace a run of the same name")
    resume: bool = option(False, "resume a run of the same name and configuration after its last committed round")


@dataclass(frozen=True)
class EngineConfig:
    """The engine: it carries messages between server and sites."""

    name: str = option(
        "ray", "inline: this process; ray: Ray actors; flower: a real federation", choices=("inline", "ray", "flower")
    )
    workers: int = option(0, "processes that run sites; 0: chosen for the machine", low=0)
    address: str = option(
        "", "ray: address of a cluster; empty: start Ray on this machine; flower: a federation's folder", path=True
    )
    ship_data: bool = option(False, "ray with an address: send the data folder to the nodes; false: they have it")
    num_cpus: float = option(1.0, "CPU cores per worker", low=0.0)
    num_gpus: float = option(0.0, "GPUs per worker; with a fraction, workers share a GPU", low=0.0)
    vectorise: int = option(1, "ray: train so many equal sites together; results then agree only up to rounding", low=1)
    compile: bool = option(False, "use torch.compile (needs a C++ compiler); results then agree only up to rounding")
    task_timeout: float = option(0.0, "ray: seconds that a site may take for a message; 0: no limit", low=0.0)
    threads: int = option(1, "torch threads per worker; results are bit-identical only for the same number", low=1, high=256)
    device: str = option("auto", "auto: a GPU if the worker has one", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class DataConfig:
    """The source of domains, and the format of images."""

    root: str = option("", "folder with the data; empty: $FEDLOOM_DATA, else ./data", path=True)
    download: bool = option(False, "let torchvision download missing data")
    size: Any = option(
        16,
        "resize images to size x size pixels, or to [height, width]; 0: as they are, all of one size",
        takes="a whole number, or two in a list",
    )
    grey: bool = option(True, "true: one channel; false: three, or as many as the images have")
    white: int = option(0, "level of 16-bit images that is white; 0: 65535", low=0, high=65535)
    heads: str = option(
        "shared",
        "outputs of networks: shared by all domains; task: a block for each domain; own: only those of the site's domain",
        choices=("shared", "task", "own"),
    )
    classes: int = option(0, "number of outputs of shared heads; 0: the number of the domains' classes", low=0)
    form: dict[str, Any] = option(
        {}, "form of examples if this machine has no data: {kind: features, shape: [30], task: class}; empty: the domains'"
    )
    standardise: str = option(
        "",
        "subtract the mean of features and of numbers to predict, and divide by the deviation. site: over the site's own "
        "training examples; sites: over all sites'; none: neither; empty: sites for features and sequences, else none",
        choices=("", "none", "site", "sites"),
    )
    validation: float = option(0.1, "share of a domain's training examples held out for validation", low=0.0, high=0.5)
    validation_limit: int = option(1000, "maximum of validation examples per domain", low=1)
    test_limit: int = option(0, "maximum of test examples per domain; 0: all", low=0)


@dataclass(frozen=True)
class TrainingConfig:
    """A site's training in a round. Default: SGD, as in the papers. Optimisers start with empty state in each round."""

    epochs: float = option(1.0, "passes over the site's examples per round; a fraction counts, to whole batches", low=1e-3)
    steps: int = option(0, "steps per round, instead of epochs; 0: use epochs", low=0)
    batch: int = option(32, "examples per step", low=1, high=2**31)
    optimizer: Any = option(
        "sgd", "a class of torch.optim, or module:attribute; with options: {name: adamw, eps: 1e-6}", takes=NAMED
    )
    rate: float = option(0.03, "initial learning rate of any optimizer", low=0.0)
    momentum: float = option(0.9, "momentum of sgd; other optimizers have their own options", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "L2 penalty of sgd; other optimizers have their own options", low=0.0)
    schedule: Any = option(
        "cosine",
        "of the rate over all rounds: cosine, constant, step; with options: {name: step, every: 5, warm_up: 1}",
        takes=NAMED,
    )
    loss: Any = option(
        "",
        "empty: the targets' usual loss; cross_entropy, focal, binary_cross_entropy, mse, mae, huber, quantile, or "
        "module:function of (outputs, targets) (a callable object's attributes may hold state during a site's round, global "
        "variables may not); with options: {name: focal, gamma: 2, class_weights: [1, 5]} or "
        "{name: cross_entropy, class_weights: balanced}",
        takes=NAMED,
    )
    clip: float = option(0.0, "clip gradients to this norm; 0: no clipping", low=0.0)
    label_smoothing: float = option(
        0.0, "share of each label that is spread over all classes, in the task's loss", low=0.0, high=1.0
    )
    augment: list[Any] = option(
        [], "augmentations of training examples from torchvision.transforms.v2: [{name: RandomCrop, size: 32, padding: 4}]"
    )
    precision: str = option("float32", "of forward and backward passes; bf16: autocast", choices=("float32", "bf16"))
    channels_last: bool = option(False, "store images with channels as the last dimension in memory")


@dataclass(frozen=True)
class FederationConfig:
    """The round loop: number of sites and replies, time limits, secure aggregation, and limits of replies."""

    fraction: float = option(
        1.0, "share of sites in each round; at least one site, under secure aggregation two", low=1e-9, high=1.0
    )
    min_replies: int = option(1, "a round needs at least so many valid replies", low=1)
    window: int = option(0, "messages in flight at once; 0: as many as fit in 256 MiB", low=0)
    timeout: float = option(3600.0, "time limit of a round in seconds", low=1.0)
    dropout: float = option(
        0.0,
        "to study stragglers: probability that a site fails in a round, before, in the middle of or after its training; the "
        "seed draws it, and the sites that a round needs do not fail",
        low=0.0,
        high=1.0,
    )
    join_timeout: float = option(120.0, "seconds to wait for all sites at the start", low=0.0)
    min_sites: int = option(0, "sites that must join within join_timeout; others may join later; 0: all", low=0)
    lost_store: str = option(
        "restart",
        "a site that has lost its own state. restart: it begins at its contribution; stop: the run stops",
        choices=("restart", "stop"),
    )
    history: str = option(
        "latest", "a site's contributions that the server stores: the latest, or all rounds'", choices=("latest", "all")
    )
    history_rounds: int = option(0, "history=all: last rounds to which --rollback can go back; 0: all", low=0)
    partial_sums: bool | None = option(
        None,
        "workers of Ray add up contributions; null: if the method allows it and all workers run on this machine; "
        "true on a cluster needs the server's disk or node_store",
    )
    node_store: str = option(
        "",
        "partial_sums: folder on each node for its sites' contributions in a run: an absolute path ($NAME: the node's)",
    )
    secure_aggregation: bool = option(False, "sites mask their contributions, so that the server can read only sums")
    secure_threshold: float = option(
        0.67,
        "secure aggregation: share of a round's sites that must reply until its end",
        low=0.5,
        high=1.0,
    )
    packed: str = option(
        "none", "send contributions rounded to half the bytes; their sums stay exact", choices=("none", "bf16", "int16")
    )
    scale_bits: int = option(32, "resolution of exact sums: 2**-scale_bits", low=8, high=48)
    largest_weight: float = option(1e4, "refuse replies with an entry of a larger absolute value; 0: no limit", low=0.0)
    largest_change: float = option(
        1e3, "refuse replies with a larger change (L2 norm) from the site's start of the round; 0: no limit", low=0.0
    )
    clip_change: float = option(
        0.0, "the server scales larger changes (L2 norm) from the site's start of the round to this; 0: no limit", low=0.0
    )
    most_samples: int = option(
        0,
        "maximum of training examples per site; 0: as configured, or for own data ten times the median of the others",
        low=0,
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy of a site's contributions (clients.privacy.differential). Zero clip and noise: off."""

    clip: float = option(0.0, "largest change (L2 norm) that a site sends in a round; larger ones are scaled to it", low=0.0)
    noise: float = option(0.0, "noise multiplier: the standard deviation of the noise is noise * clip", low=0.0, high=1e6)
    delta: float = option(1e-5, "delta of the reported epsilon", low=1e-15, high=0.5)
    epsilon: float = option(0.0, "a site stops training when its rounds would cost more; 0: no limit", low=0.0)


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured, when, where and how."""

    metrics: list[Any] = option(
        [],
        "metrics by name, or module:Class with options; the first one is what curves, tables and searches show; empty: "
        "those of the targets (classes: accuracy)",
    )

    every: int = option(1, "measure on validation examples every so many rounds", low=1)
    where: str = option(
        "server", "server: on the domains' examples; sites: each site on its own examples", choices=("server", "sites")
    )
    batch: int = option(500, "examples per forward pass", low=1)
    keep: str = option(
        "last",
        "best: also store and measure the network of the round with the best stopping.metric on validation examples, as "
        "`best`; forgetting a site deletes it",
        choices=("last", "best"),
    )
    statistics: str = option(
        "running",
        "BatchNorm's statistics: the network's own, those of each batch, or recomputed on validation examples",
        choices=("running", "batch", "recomputed"),
    )
    sites: int = option(50, "sites measured one by one at the end, a random sample of those that trained; -1: all", low=-1)
    classes: bool = option(False, "in a real federation: sites also report correct answers and examples of each class")


@dataclass(frozen=True)
class StoppingConfig:
    """Early stopping, by values on validation examples."""

    metric: str = option("", "one of evaluation.metrics; empty: the first. evaluation.keep=best uses it, too")
    patience: int = option(0, "stop when so many rounds bring no better value; 0: train all rounds", low=0)
    min_change: float = option(0.0, "a value is better if it changes by more than this", low=0.0)


@dataclass(frozen=True)
class Config:
    """All settings of an experiment. Raise `VERSION` in conf/loading.py if a key is added, removed or changed."""

    experiment: str = option("", "name of the YAML file")
    seed: int = option(0, "seed of everything random", low=0)
    rounds: int = option(10, "federated rounds", low=1, high=MOST_ROUNDS)
    sites: Any = option(
        None,
        "a list of sites, or a number of sites with the entries of `population`",
        entries=SiteConfig,
        takes="a list of sections, or a whole number",
    )
    population: list[SiteConfig] = option([], "entries for a number of `sites`, which get them in turn")
    network: dict[str, Any] = option({}, "name: a network, or module:attribute; and its options", named=True)
    objective: dict[str, Any] = option({}, "name: what a site minimises; and its options", named=True)
    strategy: dict[str, Any] = option({}, "name: what the server does with the replies; and its options", named=True)
    baselines: list[str] = option([], "other modes of the objective, run on the same data for comparison")
    run: RunConfig = option(RunConfig, "the run's folder")
    engine: EngineConfig = option(EngineConfig, "the engine, which carries messages")
    data: DataConfig = option(DataConfig, "source and format of the data")
    training: TrainingConfig = option(TrainingConfig, "training at a site")
    federation: FederationConfig = option(FederationConfig, "the round loop")
    privacy: PrivacyConfig = option(PrivacyConfig, "differential privacy")
    evaluation: EvaluationConfig = option(EvaluationConfig, "measuring networks")
    stopping: StoppingConfig = option(StoppingConfig, "early stopping")
    tracking: list[Any] = option(
        [], "trackers that record each round: tensorboard, mlflow, wandb, csv; with options: {name: mlflow, uri: ...}"
    )

    def __repr__(self) -> str:
        names = dict.fromkeys(str(part.get("name")) for part in (self.strategy, self.objective) if isinstance(part, dict))
        try:
            sites = f"{len(self.roster)} sites"
        except UserError:
            sites = "wrong sites"
        return f"Config({self.experiment}: {' and '.join(names)}, {sites}, {self.rounds} rounds)"

    @functools.cached_property
    def roster(self) -> list[Site]:
        """All sites, in order. Raises UserError for a wrong `sites`, no sites or a repeated name."""
        return roster(self.sites, self.population)

    @functools.cached_property
    def domains(self) -> tuple[str, ...]:
        """The domains of the sites, without repetition."""
        return tuple(dict.fromkeys(site.spec.domain for site in self.roster))
