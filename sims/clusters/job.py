"""A run on several nodes: its configuration, the size of the nodes, and the command that starts it there."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf import load
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.typed import build, option

LINE = re.compile(".*"), "a text in one line"
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,499}"), "an image, such as registry/fedloom:0.1"
TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,2}):([0-5]\d):([0-5]\d)"), "[DAYS-]HOURS:MINUTES:SECONDS, such as 24:00:00"
OURS = ("engine.name", "engine.address")  # keys that the files set
MOST_NAME = 40  # letters, so that Kubernetes can add its own


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster; all have the same size."""

    nodes: int = option(2, "machines, including the one with the run's server", low=1, high=10_000)
    cpus: int = option(8, "CPU cores to use on each node", low=1, high=4096)
    gpus: int = option(0, "GPUs to use on each node", low=0, high=64)
    time: str = option("24:00:00", "time limit, [DAYS-]HOURS:MINUTES:SECONDS")
    image: str = option("", "container image with fedloom; empty: no container")
    environment: str = option(
        "", "Python environment (venv) with fedloom, at the same path on all nodes; empty: use the PATH"
    )
    port: int = option(6379, "port of Ray on the first node", low=1024, high=65535)


@dataclass(frozen=True)
class ClusterJob:
    """A run on a cluster and its nodes. `arguments`: those of `fedloom run`."""

    nodes: Nodes
    arguments: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        """The run's name for job managers: small letters, digits and '-'."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return f"fedloom-{name}"[:MOST_NAME].rstrip("-")

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        match = TIME[0].fullmatch(self.nodes.time)
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def room(self) -> int:
        """The largest number of workers that fit on the cores and GPUs of all nodes."""
        engine = self.config.engine
        parts = [(self.nodes.cpus, engine.num_cpus), (self.nodes.gpus, engine.num_gpus)]
        return self.nodes.nodes * min((int(size / need) for size, need in parts if need), default=self.nodes.cpus)

    @property
    def workers(self) -> int:
        """The number of workers: the configuration's, or as many as the nodes allow."""
        return self.config.engine.workers or self.room

    def command(self, address: str, *more: str) -> list[str]:
        """Return the words of the command that starts the run on a node of the Ray cluster at `address`.

        It names the number of workers: workers wait for their node, and the others start.
        """
        return ["fedloom", "run", *self.arguments, "engine.name=ray", f"engine.workers={self.workers}", *more,
                f"engine.address={address}"]  # fmt: skip

    def path(self) -> str:
        """Return the shell line that puts the environment on the PATH, or "" without an environment."""
        return f'export PATH={shlex.quote(self.nodes.environment)}/bin:"$PATH"' if self.nodes.environment else ""


def job(experiment: str, overrides: Sequence[str], nodes: dict) -> ClusterJob:
    """Read and check a run's configuration; return its job. Raises UserError if it is not valid, or nodes are too few."""
    shape = build(Nodes, nodes)
    for word in (experiment, *overrides):
        checked("the run's words", word, (LINE[0], "texts in one line"))
    for name in ("image", "environment"):
        checked(f"--{name}", getattr(shape, name), LINE)
    checked("--time", shape.time, TIME)
    keys = {word.partition("=")[0] for word in overrides}
    if odd := next((key for key in OURS if key in keys), ""):
        raise UserError(f"{odd}: the file itself sets it; leave it out")
    if shape.gpus and "engine.num_gpus" not in keys:
        overrides = [*overrides, "engine.num_gpus=1"]
    shown = tuple(word for word in overrides if not word.startswith("engine.workers="))
    made = ClusterJob(shape, (experiment, *shown), load(experiment, overrides))
    if not made.seconds:
        raise UserError(f"--time: got {shape.time}, takes more than nothing, such as 24:00:00")
    if made.workers > made.room or not made.room:  # some workers would wait for ever
        raise UserError(f"engine.workers: {shape.nodes} nodes of --cpus {shape.cpus} and --gpus {shape.gpus} have room for "
                        f"{made.room} (engine.num_cpus, engine.num_gpus), not for {made.workers or 1}")  # fmt: skip
    return made


def checked(name: str, text: str, takes: tuple[re.Pattern[str], str]) -> str:
    """Return `text`. Raises UserError if it does not match `takes`, or has characters that cannot be printed."""
    if not (text.isprintable() and takes[0].fullmatch(text)):
        raise UserError(f"{name}: got '{plain(text)[:100]}', takes {takes[1]}")
    return text


def filled(template: str, **values: Any) -> str:
    """Return a YAML template with each {name} replaced by its value, written as JSON, which is YAML."""
    return template.format(**{name: json.dumps(value) for name, value in values.items()})
