"""Runs in their folders: copied, and taken up again."""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.conf import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run.experiment import open_ledger
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.server.unlearning.verification import Finding, verify
from tests.server.parts import folder


def copied(config: Config, root: Path) -> Config:
    """A copy of a run to work on."""
    there = dataclasses.replace(config, run=dataclasses.replace(config.run, root=str(root)))
    shutil.copytree(folder(config), folder(there))
    return there


def to_resume(config: Config) -> Config:
    """The configuration by which a run goes on."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))


@contextmanager
def method_of(config: Config) -> Iterator[TrainingRun]:
    """A run at work: the one in its folder, or a new one."""
    where = RunFolder(folder(config))
    if not where.path.exists():
        where.open(config)
    with open_ledger(config, where) as ledger:
        yield TrainingRun(config, where, ledger, Evaluator(config))


def findings(config: Config, name: str = "r1") -> list[Finding]:
    """What verifying a run's certificate finds."""
    with Ledger.open(folder(config), server=False) as ledger:
        return verify(folder(config) / CERTIFICATES / f"{name}.json", ledger)


def verdicts(config: Config, name: str = "r1") -> set[str]:
    return {finding.verdict for finding in findings(config, name)}
