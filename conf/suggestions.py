"""Suggest a key for an unknown one: by another tool's word for it, or a key with the same name in another section."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import SiteConfig
from fedloom.conf.typed import UnknownKeyError

WORDS = {
    "engine.device": ("cuda", "gpu"),
    "engine.name": ("backend", "simulation"),
    "engine.num_gpus": ("gpus", "client_resources"),
    "engine.workers": ("num_workers", "processes"),
    "data.size": ("image_size", "img_size", "resolution"),
    "data.validation": ("validation_split", "val_split", "validation_size"),
    "federation.fraction": (
        "fraction_fit",
        "fraction_train",
        "client_fraction",
        "participation",
        "sample_fraction",
        "clients_per_round",
    ),
    "federation.min_replies": ("min_fit_clients", "min_train_nodes", "min_available_clients", "min_clients"),
    "network": ("model", "net", "architecture"),
    "objective": ("loss", "criterion"),
    "objective.mu": ("mu", "proximal_mu", "fedprox_mu", "proximal"),
    "privacy.noise": ("noise_multiplier", "sigma"),
    "rounds": ("num_rounds", "n_rounds", "num_server_rounds", "global_epochs", "communication_rounds"),
    "run.root": ("output", "output_dir", "out", "save_dir", "log_dir", "dir"),
    "seed": ("random_seed", "random_state"),
    "sites": ("clients", "num_clients", "n_clients", "num_supernodes", "num_partitions", "nodes", "parties"),
    "sites.0.domain": ("dataset", "datasets", "data_set"),
    "sites.0.partition": ("partitioner", "partitioning", "partitions", "non_iid", "num_shards", "shards"),
    "sites.0.partition.alpha": ("dirichlet", "dirichlet_alpha"),
    "sites.0.partition.classes_per_site": (
        "classes_per_client",
        "classes_per_partition",
        "num_classes_per_partition",
        "labels_per_client",
        "shards_per_client",
        "num_shards_per_node",
    ),
    "strategy": ("algorithm", "method", "aggregation", "aggregator"),
    "tracking": ("logger", "loggers", "trackers", "tensorboard", "wandb", "mlflow"),
    "training.augment": ("augmentation", "augmentations", "data_augmentation", "transform", "transforms"),
    "training.optimizer": ("optim",),
    "training.batch": ("batch_size", "local_batch_size"),
    "training.epochs": ("local_epochs", "num_epochs", "n_epochs"),
    "training.rate": ("lr", "learning_rate"),
    "training.schedule": ("scheduler", "lr_scheduler", "lr_decay", "warmup"),
    "training.steps": ("local_steps", "num_steps"),
    "training.weight_decay": ("wd", "l2"),
}
BY_WORD = {word: key for key, words in WORDS.items() for word in words}


def with_suggestion(error: UnknownKeyError) -> UserError:
    """Return the error with the key that the user probably means (`by_word`) as suggestion, if there is one."""
    near = by_word(error.key.rpartition(".")[2])
    return error.suggesting(near) if near else error


def by_word(word: str) -> str:
    """Return the dotted key that ends in `word`, or that other tools call so; empty for no key or several."""
    word = word.lower()
    keys = [BY_WORD[word]] if word in BY_WORD else _keys_by_word().get(word, [])
    return keys[0] if len(keys) == 1 else ""


@functools.cache
def _keys_by_word() -> dict[str, list[str]]:
    """Return the dotted keys of a configuration by their last parts."""
    keys: dict[str, list[str]] = {}
    for key in _keys(Config, ""):
        keys.setdefault(key.rpartition(".")[2], []).append(key)
    return keys


def _keys(schema: Any, above: str) -> Iterator[str]:
    for field in dataclasses.fields(schema):
        key, entry = f"{above}{field.name}", next(iter(get_args(field.type)), None)
        yield key
        if dataclasses.is_dataclass(field.type):
            yield from _keys(field.type, f"{key}.")
        elif get_origin(field.type) is list and entry is SiteConfig:
            yield from _keys(SiteConfig, "sites.0.")
