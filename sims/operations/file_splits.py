"""The splits by which networks in files were trained, so that accuracy is measured on examples that none has seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.clients.data.domains import locate
from fedloom.clients.data.splits import SplitRule, has_test_part
from fedloom.clients.networks.named import read_split
from fedloom.conf.errors import UserError
from fedloom.conf.schema import DataConfig
from fedloom.sims.operations.domain_task import Task

OPTION = "--seed"


@dataclass(frozen=True)
class FileTask(Task):
    """Images of a domain, split as in the runs that trained the networks of files.

    Attributes:
        validation: The share of training examples held out for validation.
        validation_limit: The maximum of validation examples.
    """

    validation: float = DataConfig.validation
    validation_limit: int = DataConfig.validation_limit

    def options(self) -> list[str]:
        """Return overrides for the validation examples."""
        return [f"data.validation={self.validation}", f"data.validation_limit={self.validation_limit}"]


@dataclass(frozen=True)
class FileSplits:
    """The splits of networks in files.

    Attributes:
        names: The files' names, for messages.
        records: The split that each file records; None: it records none.
        seed: The seed for files that record none; None: unknown.
    """

    names: Sequence[str]
    records: Sequence[SplitRule | None]
    seed: int | None = None

    @classmethod
    def read(cls, paths: Sequence[Path], names: Sequence[str], seed: int | None) -> "FileSplits":
        """Return the splits that files record. Raises UserError if `seed` is not the seed that a file records."""
        records = [read_split(path) for path in paths]
        for name, record in zip(names, records, strict=True):
            if record and seed not in (None, record.seed):
                raise UserError(f"{OPTION}: got {seed}, but {name} records seed {record.seed}; leave {OPTION} out")
        return cls(names, records, seed)

    @property
    def common(self) -> SplitRule | None:
        """The split by which every network was trained; None if it is unknown for one, or differs."""
        stated = None if self.seed is None else SplitRule(self.seed, DataConfig.validation, DataConfig.validation_limit)
        rules = {record or stated for record in self.records}
        return rules.pop() if len(rules) == 1 else None

    @property
    def rule(self) -> SplitRule:
        """The split to use: the recorded one, if all records have one seed, else that of `seed` (default 0)."""
        known = [record for record in self.records if record]
        if known and len({record.seed for record in known}) == 1:
            return known[0]
        return SplitRule(self.seed or 0, DataConfig.validation, DataConfig.validation_limit)

    def task(self, task: Task) -> FileTask:
        """Return the task with these splits."""
        rule = self.rule
        return FileTask(task.domain, task.size, task.grey, root=task.root, seed=rule.seed, validation=rule.validation,
                        validation_limit=rule.validation_limit)  # fmt: skip

    def checked(self, task: Task, search: bool) -> str:
        """Return a note for files that do not record their split; empty if it does not matter.

        Args:
            task: The task whose labelled examples are used.
            search: Whether validation examples are used, too.

        Raises:
            UserError: Files record different splits, so that some network was trained on examples to measure it on.
        """
        if has_test_part(locate(task.domain, task.config().data)) and not search:
            return ""
        first = next((index for index, record in enumerate(self.records) if record), None)
        if first is None:
            return self._note(task)
        for name, record in zip(self.names, self.records, strict=True):
            if record and _differ(record, self.records[first], search):
                fault = f"{self.names[first]} was trained with {_text(self.records[first])}, {name} with {_text(record)}"
                raise UserError(f"--labels {task.domain}: {fault}. Each has seen examples that the other's run held out; "
                                "use files of runs with equal values, or leave --labels out")  # fmt: skip
        return self._note(task)

    def _note(self, task: Task) -> str:
        silent = [name for name, record in zip(self.names, self.records, strict=True) if not record]
        if not silent or self.seed is not None:
            return ""
        who = f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not record the seed of the training"
        return (f"{who}. These examples of {task.domain} are those of seed {self.rule.seed}; a network that was trained "
                f"with another seed has seen some of them. Add {OPTION} N for networks of a run with seed N")  # fmt: skip


def _differ(one: SplitRule, other: SplitRule | None, search: bool) -> bool:
    """Return whether two splits have different test examples, or with `search` different validation examples."""
    return other is not None and (one != other if search else one.seed != other.seed)


def _text(rule: SplitRule | None) -> str:
    if rule is None:
        return "an unknown split"
    return f"seed {rule.seed} (data.validation {rule.validation:g}, data.validation_limit {rule.validation_limit})"
