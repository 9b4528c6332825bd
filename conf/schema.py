"""The configuration of an experiment, as frozen dataclasses. Every field says what it takes."""

import functools
from dataclasses import dataclass
from typing import Any

from fedloom.conf.sites import Site, SiteConfig, roster
from fedloom.conf.typed import option

MOST_ROUNDS = 999_999


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept."""

    name: str = option("", "folder of the run under run.root; empty: the experiment's name")
    root: str = option("runs", "folder that holds all runs", path=True)
    overwrite: bool = option(False, "replace a run of the same name")
    resume: bool = option(False, "go on with a run of the same name and configuration after its last committed round")


@dataclass(frozen=True)
class EngineConfig:
    """What carries messages between server and sites."""

    name: str = option(
        "ray", "inline: this process; ray: Ray actors; flower: a real federation", choices=("inline", "ray", "flower")
    )
    workers: int = option(0, "processes that run sites; 0: sized to the machine", low=0)
    address: str = option(
        "", "ray: of a cluster; empty: one on this machine is started; flower: a federation's folder", path=True
    )
    ship_data: bool = option(False, "with an address: send the data folder to the cluster's nodes; off: they have it")
    num_cpus: float = option(1.0, "CPU cores per worker", low=0.0)
    num_gpus: float = option(0.0, "GPUs per worker (a fraction shares one)", low=0.0)
    vectorise: int = option(1, "ray: sites of one shape trained as one (results then agree up to rounding only)", low=1)
    compile: bool = option(False, "torch.compile of full batches: needs a C++ compiler; agrees up to rounding only")
    task_timeout: float = option(0.0, "ray: seconds one site may take for one message; 0: no limit", low=0.0)
    threads: int = option(1, "torch threads per worker; results are bit-identical only for the same number", low=1, high=256)
    device: str = option("auto", "auto: a GPU if the worker sees one", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class DataConfig:
    """Where domains come from, and what every image becomes."""

    root: str = option("", "folder with the data; empty: $FEDLOOM_DATA, else ./data", path=True)
    download: bool = option(False, "let torchvision fetch what is in no folder")
    size: int = option(16, "images become size x size pixels", low=4, high=512)
    grey: bool = option(True, "one channel; false: three")
    heads: str = option(
        "shared",
        "outputs: shared by all domains; task: a block of them for each; own: a site's network has its domain's alone",
        choices=("shared", "task", "own"),
    )
    classes: int = option(0, "outputs of shared heads; 0: as many as the domains have classes", low=0)
    validation: float = option(0.1, "share of a domain's training images held out to watch and choose by", low=0.0, high=0.5)
    validation_limit: int = option(1000, "most validation images of a domain", low=1)
    test_limit: int = option(0, "most test images of a domain; 0: all", low=0)


@dataclass(frozen=True)
class TrainingConfig:
    """What a site does in a round. By default SGD, as in the papers; optimisers start anew in each round."""

    epochs: int = option(1, "passes over the site's images per round", low=1)
    steps: int = option(0, "steps per round instead of whole passes; 0: passes", low=0)
    batch: int = option(32, "images per step", low=1, high=2**31)
    optimizer: Any = option("sgd", "one of torch.optim by name, or module:attribute; with options: {name: adamw, eps: 1e-6}")
    rate: float = option(0.03, "learning rate at the start, of every optimizer", low=0.0)
    momentum: float = option(0.9, "momentum of sgd; others have their own options", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "L2 penalty of sgd; others have their own options", low=0.0)
    schedule: Any = option(
        "cosine", "of the rate over all rounds: cosine, constant, step; with options: {name: step, every: 5, warm_up: 1}"
    )
    clip: float = option(0.0, "largest gradient norm; 0: no clipping", low=0.0)
    label_smoothing: float = option(
        0.0, "share of each label that all classes divide, in the task's loss", low=0.0, high=1.0
    )
    augment: list[Any] = option(
        [], "of training images, by names of torchvision.transforms.v2: [{name: RandomCrop, size: 32, padding: 4}]"
    )
    precision: str = option("float32", "of forward and backward passes; bf16: autocast", choices=("float32", "bf16"))
    channels_last: bool = option(False, "convolutions with channels as the innermost dimension of memory")


@dataclass(frozen=True)
class FederationConfig:
    """The round loop."""

    fraction: float = option(
        1.0, "share of the sites asked in each round, at least one (under masks two)", low=1e-9, high=1.0
    )
    min_replies: int = option(1, "fewest good replies with which a round counts", low=1)
    window: int = option(0, "messages under way at once; 0: by their size, within 256 MiB", low=0)
    timeout: float = option(3600.0, "seconds a round may take", low=1.0)
    join_timeout: float = option(120.0, "seconds to wait for all sites at the start", low=0.0)
    min_sites: int = option(0, "sites that must be there by then; others may come later; 0: all", low=0)
    lost_store: str = option(
        "restart",
        "a site that lost its own state begins at its contribution, or stops all",
        choices=("restart", "stop"),
    )
    history: str = option(
        "latest", "contributions the server keeps of a site: latest, or those of all rounds", choices=("latest", "all")
    )
    partial_sums: bool = option(False, "workers add up their sites' contributions; they need its disk, or node_store")
    node_store: str = option(
        "",
        "partial_sums: where each node keeps its sites' contributions till the run ends: a whole path ($NAME: the node's)",
    )
    secure_aggregation: bool = option(False, "sites mask what they send: the server can read nothing but sums")
    secure_threshold: float = option(
        0.67,
        "under masks: share of a round's sites that must answer to its end",
        low=0.5,
        high=1.0,
    )
    packed: str = option(
        "none", "what sites send after training in half of its bytes (sums stay exact)", choices=("none", "bf16", "int16")
    )
    scale_bits: int = option(32, "exact sums count in units of 2**-scale_bits", low=8, high=48)
    largest_weight: float = option(1e4, "replies with an entry of a larger absolute value are refused; 0: none", low=0.0)
    largest_change: float = option(
        1e3, "replies further (L2 norm) from what the site started from are refused; 0: none", low=0.0
    )
    clip_change: float = option(
        0.0, "the server scales replies further (L2 norm) from what the site started from back to so far; 0: none", low=0.0
    )
    most_samples: int = option(
        0, "most samples of a site; 0: as its configuration says, or (own data) ten times the median of the others", low=0
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy of what leaves a site (clients.privacy.differential). Zero clip and noise: none."""

    clip: float = option(
        0.0, "largest change (L2 norm) of what a site sends in a round; larger ones are scaled to it", low=0.0
    )
    noise: float = option(0.0, "noise multiplier: the noise's standard deviation is noise * clip", low=0.0, high=1e6)
    delta: float = option(1e-5, "for which epsilon is told", low=1e-15, high=0.5)
    epsilon: float = option(0.0, "a site trains no further when its rounds would cost more; 0: no limit", low=0.0)


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how the server measures accuracy."""

    every: int = option(1, "validation accuracy after every so many rounds", low=1)
    where: str = option(
        "server", "server: it has the domains' images; sites: each measures on its own images", choices=("server", "sites")
    )
    batch: int = option(500, "images per forward pass", low=1)
    statistics: str = option(
        "running",
        "BatchNorm's: the network's own, those of each batch, or its own measured again on validation images",
        choices=("running", "batch", "recomputed"),
    )
    sites: int = option(
        50, "of the sites that trained, a random sample of so many is looked at one by one at the end; -1: all", low=-1
    )
    classes: bool = option(False, "in a real federation: sites also tell right answers and images of each class")


@dataclass(frozen=True)
class Config:
    """One experiment. A key that comes, goes or changes its meaning raises `VERSION` in conf/load.py."""

    experiment: str = option("", "name of the YAML file")
    seed: int = option(0, "of everything that is random", low=0)
    rounds: int = option(10, "federated rounds", low=1, high=MOST_ROUNDS)
    sites: Any = option(
        None, "a list of sites, or a number: that many sites dealt out over `population`", entries=SiteConfig
    )
    population: list[SiteConfig] = option([], "the entries that a number of `sites` is dealt out over, in turn")
    network: dict[str, Any] = option({}, "name: a registered network or module:attribute, and its options", named=True)
    objective: dict[str, Any] = option({}, "name: what a site minimises, and its options", named=True)
    strategy: dict[str, Any] = option({}, "name: what the server does with the replies, and its options", named=True)
    baselines: list[str] = option([], "other modes of the objective, run beside it on the same data")
    run: RunConfig = option(RunConfig, "where the run is kept")
    engine: EngineConfig = option(EngineConfig, "what carries the messages")
    data: DataConfig = option(DataConfig, "where data comes from")
    training: TrainingConfig = option(TrainingConfig, "a site's training")
    federation: FederationConfig = option(FederationConfig, "the round loop")
    privacy: PrivacyConfig = option(PrivacyConfig, "differential privacy")
    evaluation: EvaluationConfig = option(EvaluationConfig, "measuring")
    tracking: list[Any] = option(
        [], "trackers that are told of each round: tensorboard, mlflow, wandb, csv; {name: ...}: options"
    )

    @functools.cached_property
    def roster(self) -> list[Site]:
        """All sites, in order. Raises UserError for no sites, a double name or a `sites` of another kind."""
        return roster(self.sites, self.population)

    @functools.cached_property
    def domains(self) -> tuple[str, ...]:
        """The domains of the sites, each once."""
        return tuple(dict.fromkeys(site.spec.domain for site in self.roster))
