"""Checks of the section `training` before a run starts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.clients.data import domain_specs, outputs, site_sizes
from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.data.schema import CLASS, NEXT
from fedloom.clients.networks import Architecture, form_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.networks.named import read_split
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.packing import NONE
from fedloom.clients.training.augmentation import check_augmentation
from fedloom.clients.training.learner import check_batches
from fedloom.clients.training.loss import LOSSES, check_number, loss_section
from fedloom.clients.training.loss import WHERE as LOSS
from fedloom.clients.training.optimizers import SGD, WHERE, Optimizer, optimizer_section
from fedloom.clients.training.tasks import end_task, renew
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import error_summary
from fedloom.conf.schema import EngineConfig, TrainingConfig
from fedloom.fusion.exact import ExactSumError, check_range


def check_training(experiment: Experiment, architectures: Iterable[Architecture]) -> None:
    """Raise UserError for training options that do not fit the networks or the images. The optimiser tries a step."""
    renew(experiment)
    try:
        _check_parts(experiment, architectures)
    finally:
        end_task(experiment)


def _check_parts(experiment: Experiment, architectures: Iterable[Architecture]) -> None:
    config, training, optimizer = experiment.config, experiment.config.training, experiment.training.optimizer
    if isinstance(optimizer, SGD):
        _step(optimizer, [torch.zeros(1)], training)
    else:
        check_handed_on(training)
        for architecture in architectures:
            _step(optimizer, [one for one in architecture.build().parameters() if one.requires_grad], training)
    form = form_of(config)
    _check_loss(experiment, form)
    check_augmentation(experiment.training.augmentation, form)
    if training.channels_last:
        form.takes(IMAGE, what="training.channels_last")
    _check_stacking(config.engine, training, optimizer)


def check_sizes(experiment: Experiment) -> None:
    """Raise UserError for a site without a batch that its network can train on. Reads labels."""
    config = experiment.config
    for site, size in zip(config.roster, site_sizes(config), strict=True):
        check_batches(size, experiment, site)


def check_handed_on(training: TrainingConfig) -> None:
    """Raise UserError for options of sgd that another optimiser would ignore."""
    name, usual = optimizer_section(training)["name"], TrainingConfig()
    for key in ("momentum", "weight_decay"):
        if getattr(training, key) != getattr(usual, key):
            raise UserError(f"training.{key}: applies to sgd only; set the options of '{name}' in {WHERE}")


def _step(optimizer: Optimizer, moving: Sequence[Tensor], training: TrainingConfig) -> None:
    """Raise UserError if the optimiser does not take these weights, or fails in a first step."""
    step = optimizer.bind(moving, training)
    try:
        with torch.no_grad():
            step(training.rate, [torch.ones_like(weight) for weight in moving])
    except Exception as error:
        name = optimizer_section(training)["name"]
        raise UserError(f"{WHERE}: '{name}' failed in a step ({error_summary(error)})") from error


def _check_loss(experiment: Experiment, form: Form) -> None:
    """Raise UserError for wrong weights, and if a user's loss fails on four examples or has no gradient."""
    loss, task, config = experiment.loss, experiment.task, experiment.config
    for block in [outputs(config, spec) for spec in domain_specs(config).values()]:
        loss.check(block.stop - block.start)
    if loss.by_site and config.engine.compile:
        raise UserError(f"{LOSS}.class_weights: differ by site, so each would be compiled; set engine.compile=false")
    name = str(loss_section(config.training, task)["name"])
    if LOSSES.shipped(name) or config.data.heads != "shared":
        return
    steps = (form.length,) if form.each_step else ()
    scores = torch.full((4, *steps, form.outputs), 0.5, requires_grad=True)
    numbers = torch.arange(scores[..., 0].numel()).reshape(4, *steps) % form.outputs
    targets = numbers if task in (CLASS, NEXT) else (torch.arange(4 * form.outputs) % 2).reshape(4, form.outputs).float()
    try:
        made = loss.value(scores, targets, 0.0)
    except UserError:
        raise
    except Exception as error:
        takes = f"outputs {list(scores.shape)} and targets {list(targets.shape)}"
        raise UserError(f"{LOSS}: '{name}' fails on {takes} ({error_summary(error)})") from error
    check_number(made, name)
    if not made.requires_grad:
        raise UserError(f"{LOSS}: '{name}' returned a number without a gradient; compute it from the outputs with torch")


def _check_stacking(engine: EngineConfig, training: TrainingConfig, optimizer: Optimizer) -> None:
    """Raise UserError for options that do not work with engine.vectorise."""
    if engine.vectorise == 1:
        return
    if not optimizer.elementwise:
        name = optimizer_section(training)["name"]
        raise UserError(f"engine.vectorise: optimizer '{name}' may mix the weights of sites that are trained together; "
                        "set engine.vectorise=1, or choose an optimizer such as adamw")  # fmt: skip
    if training.channels_last:
        raise UserError("engine.vectorise: does not work with training.channels_last; set engine.vectorise=1, or "
                        "training.channels_last=false")  # fmt: skip


def check_weights(experiment: Experiment) -> None:
    """Raise UserError if network.start or network.freeze cannot work with the method or the engine."""
    config, objective = experiment.config, experiment.objective
    if config.engine.name == "flower":
        experiment.check_start()
    for path, site in experiment.starts.items():
        try:
            check_range(initial_state(config, site=site), config.federation.scale_bits)
        except ExactSumError as error:
            raise UserError(f"network.start: {path}: {error}, so it cannot be summed; scale it") from None
    if not any(architecture.freeze for architecture in experiment.architectures):
        return
    rounded = {"federation.packed": config.federation.packed != NONE, "privacy.noise": bool(config.privacy.noise)}
    changing = next((f"changes them with {key}" for key, on in rounded.items() if on and not objective.starts_at_server), "")
    if fault := changing or ("" if objective.keeps_frozen else "moves all weights"):
        raise UserError(f"network.freeze: objective '{config.objective['name']}' {fault}; use fedavg, for example")
    if config.evaluation.statistics == "recomputed":
        raise UserError(
            "network.freeze: evaluation.statistics=recomputed changes frozen BatchNorm layers; set it to running"
        )


def start_notes(experiment: Experiment) -> list[str]:
    """Return lines that say what fits of the files that networks start from (network.start)."""
    if not experiment.starts:
        return []
    from fedloom.clients.networks.start import start_lines  # imported only where it is used

    lines: list[str] = []
    for path, site in experiment.starts.items():
        lines += [*start_lines(path, experiment.architecture(site).build()), *_other_split(path, experiment)]
    return lines


def _other_split(path: str, experiment: Experiment) -> list[str]:
    """Return a line if the network in a file was trained with another seed than the run's."""
    record, seed = read_split(Path(path)), experiment.config.seed
    if record is None or record.seed == seed:
        return []
    return [f"network.start: {path} was trained with seed {record.seed}. It has seen test examples of seed {seed} if it was "
            f"trained on a domain of this run that has no test part. Then set seed={record.seed}"]  # fmt: skip
