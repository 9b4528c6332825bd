"""A run on several nodes: what it is, how large the nodes are, and the words that start it there."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.conf import load
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.typed import build, option

PATH = re.compile(".*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,499}")
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,2}):([0-5]\d):([0-5]\d)")
OURS = ("engine.name", "engine.address")  # keys that the files set
MOST_NAME = 40  # letters, so that Kubernetes can add its own


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster, all alike."""

    nodes: int = option(2, "machines, the one that the run's server is on included", low=1, high=10_000)
    cpus: int = option(8, "CPU cores of each node that are used", low=1, high=4096)
    gpus: int = option(0, "GPUs of each node that are used", low=0, high=64)
    time: str = option("24:00:00", "after which it is ended, [DAYS-]HOURS:MINUTES:SECONDS")
    image: str = option("", "container image with fedloom in it; empty: none")
    environment: str = option(
        "", "folder of a Python environment (venv) with fedloom, on all nodes; empty: it is on the PATH"
    )
    port: int = option(6379, "at which the first node's Ray listens", low=1024, high=65535)

    @property
    def seconds(self) -> int:
        """The time limit."""
        found = _TIME.fullmatch(self.time)
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True)
class ClusterJob:
    """A run and the nodes that it is for. `words`: what follows `fedloom run`, as far as the user said it."""

    nodes: Nodes
    words: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        """The run's name as job managers take it: small letters, digits and '-'."""
        kept = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return f"fedloom-{kept}"[:MOST_NAME].rstrip("-")

    @property
    def seconds(self) -> int:
        """The time limit."""
        return self.nodes.seconds

    @property
    def room(self) -> int:
        """How many workers the cores and GPUs of all nodes have room for."""
        engine = self.config.engine
        parts = [(self.nodes.cpus, engine.num_cpus), (self.nodes.gpus, engine.num_gpus)]
        return self.nodes.nodes * min((int(there / need) for there, need in parts if need), default=self.nodes.cpus)

    @property
    def workers(self) -> int:
        """As many as the configuration says, or as there is room for."""
        return self.config.engine.workers or self.room

    def command(self, address: str, *more: str) -> list[str]:
        """The words that start the run on a node of the cluster that is at `address`.

        The number of workers is said: those whose node has not joined yet wait for it, and the others begin.
        """
        return ["fedloom", "run", *self.words, "engine.name=ray", f"engine.workers={self.workers}", *more,
                f"engine.address={address}"]  # fmt: skip

    def path(self) -> str:
        """The shell's line that finds fedloom and Ray; empty if they are on the PATH anyway."""
        return f'export PATH={shlex.quote(self.nodes.environment)}/bin:"$PATH"' if self.nodes.environment else ""


def job(experiment: str, words: Sequence[str], nodes: dict) -> ClusterJob:
    """The job of a run, whose configuration is read and checked here and now. Raises UserError."""
    shape = build(Nodes, nodes)
    for word in (experiment, *words):
        checked("the run's words", word, PATH, "texts in one line")
    for name in ("image", "environment"):
        checked(f"--{name}", getattr(shape, name), PATH, "a text in one line")
    checked("--time", shape.time, _TIME, "[DAYS-]HOURS:MINUTES:SECONDS, such as 24:00:00")
    if not shape.seconds:
        raise UserError(f"--time: got {shape.time}, takes more than nothing, such as 24:00:00")
    keys = {word.partition("=")[0] for word in words}
    if odd := next((key for key in OURS if key in keys), ""):
        raise UserError(f"{odd}: is what the file itself says; leave it out")
    if shape.gpus and "engine.num_gpus" not in keys:
        words = [*words, "engine.num_gpus=1"]
    config = load(experiment, words)
    kept = tuple(word for word in words if not word.startswith("engine.workers="))
    made = ClusterJob(shape, (experiment, *kept), config)
    if made.workers > made.room or not made.room:  # they would wait for ever
        raise UserError(f"engine.workers: {shape.nodes} nodes of --cpus {shape.cpus} and --gpus {shape.gpus} have room for "
                        f"{made.room} (engine.num_cpus, engine.num_gpus), not for {made.workers or 1}")  # fmt: skip
    return made


def checked(what: str, given: str, pattern: re.Pattern[str], takes: str) -> str:
    """The same. UserError if it is not what the pattern says, or holds what cannot be printed."""
    if not (given.isprintable() and pattern.fullmatch(given)):
        raise UserError(f"{what}: got '{plain(given)[:100]}', takes {takes}")
    return given
