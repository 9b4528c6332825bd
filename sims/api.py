"""Experiments from Python, such as in a notebook: `run` one, and look at its Result."""

import contextlib
import copy
import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedloom.clients.networks import architecture_of, load_network
from fedloom.clients.training.torch_defaults import ordinary
from fedloom.conf import load
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.load import load_text
from fedloom.conf.plain_values import plain_value
from fedloom.conf.schema import Config
from fedloom.conf.yaml_text import write_yaml
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.operations import simulate as simulations
from fedloom.sims.operations.compose import name_of
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.callbacks import Callbacks, OnReply, OnRound
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.tables import accuracy_table, percent

if TYPE_CHECKING:
    import pandas

OnFinished = Callable[["Result"], object]
AGGREGATE = "aggregate"  # the file of the aggregated network


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    overwrite: bool = False,
    progress: bool = False,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    on_finished: OnFinished | None = None,
) -> "Result":
    """Run an experiment into the folder run.root/run.name; returns when it is finished.

    `experiment`: the name of one that ships, the path of a YAML file, or the same keys as a dictionary. `overrides`:
    `key=value` words as on the command line. `overwrite`: replace a run of that name. `progress`: tell how it goes.
    `on_round(record)` is called after each committed round, with its record (Result.metrics) and `part`, which is empty or
    the folder of a baseline; `on_reply(site, ok, reason)` for each answer, or why there is none; `on_finished(result)` at
    the end, when the report is written. They are called in this thread; what they raise ends the run and comes out of here.
    Raises UserError before anything starts for what cannot work. After a KeyboardInterrupt, or an error of yours, `resume`
    goes on.
    """
    config = config_of(experiment, [*overrides, *(["run.overwrite=true"] if overwrite else [])])
    with as_usual():
        callbacks = Callbacks(on_round, on_reply)
        simulations.simulate(config, listener=listener_for(quiet=not progress), listeners=[callbacks])
    return _finished(Path(config.run.root) / config.run.name, on_finished)


def config_of(experiment: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of what `run` takes. Raises UserError for what is none."""
    if odd := [word for word in overrides if not isinstance(word, str)]:
        raise UserError(f"overrides: got {odd[0]!r}, takes words such as run('digits', 'rounds=2', 'seed=1')")
    if not isinstance(experiment, str | os.PathLike | Mapping):
        raise UserError(f"experiment: got {experiment!r}, takes a name such as 'digits', the path of a file or a dictionary")
    config = _config(experiment, overrides) if isinstance(experiment, Mapping) else load(os.fspath(experiment), overrides)
    return with_default_objective(config, overrides)


def resume(
    folder: str | os.PathLike[str],
    *,
    progress: bool = False,
    tracking: Sequence[Any] | None = None,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    on_finished: OnFinished | None = None,
) -> "Result":
    """Go on with a run that was stopped, after its last committed round. Raises UserError if the folder holds none.

    `tracking`: the trackers from now on, as the key `tracking` has them, instead of those that the run began with; they get
    the rounds before, too. Callbacks as of `run`.
    """
    with as_usual():
        listener, callbacks = listener_for(quiet=not progress), Callbacks(on_round, on_reply)
        folder = Path(folder).expanduser()
        tracking = None if tracking is None else plain_value(tracking, "tracking")
        simulations.resume(folder, tracking=tracking, listener=listener, listeners=[callbacks])
    return _finished(Path(folder), on_finished)


def _finished(folder: Path, on_finished: OnFinished | None) -> "Result":
    result = Result(folder)
    if on_finished is not None:
        on_finished(result)
    return result


@dataclass(frozen=True)
class Result:
    """A run as its folder holds it now: `Result("runs/digits")` opens an earlier one. UserError if there is none."""

    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "folder", Path(folder).expanduser().resolve())
        read_config(self.folder)

    @property
    def config(self) -> Config:
        """The configuration."""
        return read_config(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says: `status`, `sites`, `accuracy`, `forgotten`, `digest`, ..."""
        return RunFolder(self.folder).summary()

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Test accuracy, a fraction of 1, by network and domain; `union`: over all domains' images together."""
        return self.summary.get("accuracy") or {}

    @property
    def per_site(self) -> dict[str, Any]:
        """How networks do on the sites' own test images: `aggregate`, `own` (the sites' own), and the baselines by mode.

        Each with `mean`, `deviation`, `deciles`, `worst`, `best`, `classes` and `sites`, as summary.json has them.
        """
        return self.summary.get("per_site") or {}

    @property
    def class_counts(self) -> dict[str, dict[int, int]]:
        """How many training images of each class a site has, by its name; empty where the server has not the data."""
        counts = self.summary.get("classes") or {}
        return {site: {int(name): number for name, number in numbers.items()} for site, numbers in counts.items()}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record of each committed round: replies, dropped sites and why, training loss, validation accuracy, seconds."""
        return list(RunFolder(self.folder).metrics().values())

    @property
    def networks(self) -> "Networks":
        """The networks by the names that `accuracy` uses, each read from its file when it is asked for."""
        return Networks(self.folder, self.config, str(self.summary.get("aggregate") or ""))

    @property
    def network(self) -> nn.Module:
        """The aggregated network, in evaluation mode; of a run that was stopped, as its last round left it.

        UserError if the method has none.
        """
        if (name := self.summary.get("aggregate") or AGGREGATE) not in self.networks:
            raise UserError(f"{self.folder}: has no aggregated network (yet); `networks` are those that there are")
        return self.networks[name]

    @property
    def report(self) -> Path:
        """The page with tables and pictures."""
        return self.folder / "report.html"

    def table(self) -> "pandas.DataFrame":
        """`metrics` as a table: a row for each round, of dropped sites their number."""
        import pandas

        records = [{**record, "dropped": len(record.get("dropped") or {})} for record in self.metrics]
        table = pandas.json_normalize(records)
        return table.set_index("round") if records else table

    def site_table(self) -> "pandas.DataFrame":
        """`per_site` as a table: a row for each site with its domain, numbers of images, each network's accuracy there."""
        import pandas

        rows = {site["name"]: {"domain": site["domain"], "samples": site["samples"]} for site in self.summary["sites"]}
        for name, scores in self.per_site.items():
            for site, score in scores["sites"].items():
                rows[site] |= {"test_images": score["images"], name: score["accuracy"]}
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("site")

    def open_ledger(self) -> Ledger:
        """The record of who contributed what, to be read: `with result.open_ledger() as ledger: list(ledger.events())`."""
        return Ledger.open(self.folder, server=False)

    def measure(self, network: nn.Module) -> dict[str, float]:
        """Test accuracy of a network of any origin by domain, as `accuracy` has it.

        It takes [n, c, h, w] float32 in [-1, 1] of the run's channels and size, and returns logits [n, classes].
        """
        evaluator = Evaluator(self.config)
        own = copy.deepcopy(network).to(evaluator.device).eval()
        with as_usual():
            return evaluator.measure("test", network=own)  # pyright: ignore[reportArgumentType]

    def unlearn(
        self,
        sites: str | Sequence[str],
        *,
        request_id: str = "",
        reason: str = "",
        repair: int = 0,
        recalibrate: bool = False,
        rollback: bool = False,
        retrain: bool = False,
        without_data: bool = False,
        progress: bool = False,
    ) -> dict[str, Any]:
        """Remove sites as `fedloom unlearn` does; the certificate, which certificates/ keeps, too.

        Where another process is at work on the run it takes the request up between rounds: {"request", "state"} till then.
        Raises UserError for sites that are unknown or forgotten already.
        """
        names = [sites] if isinstance(sites, str) else list(sites)
        asked = UnlearningRequest(names, request_id, reason, repair, retrain, rollback, recalibrate, without_data)
        with as_usual():
            return unlearn(self.folder, asked, listener=listener_for(quiet=not progress)).certificate

    def __str__(self) -> str:
        """How it stands, of what method, how good it is and where: in a line."""
        summary = self.summary
        scores = {name: shares["union"] for name, shares in self.accuracy.items() if "union" in shares}
        name = str(summary.get("aggregate") or next(iter(scores), ""))
        good = f", test accuracy {percent(scores[name])} ({name})" if name in scores else ""
        return (
            f"{summary.get('status', 'begun')}: {summary.get('method', self.config.strategy['name'])}{good}: {self.folder}"
        )

    def _repr_html_(self) -> str:
        """A notebook shows this: the accuracies, and where the rest is."""
        summary = self.summary
        table = accuracy_table(summary).html() if summary.get("accuracy") else ""
        state = html.escape(f"{summary.get('status', 'begun')}: {self.folder}")
        return f"{table}<p>{state}</p>"


class Networks(Mapping[str, nn.Module]):
    """A run's networks in evaluation mode, made new whenever one is asked for.

    With evaluation.statistics=batch BatchNorm's running statistics are not those that the run measured with.
    """

    def __init__(self, folder: Path, config: Config, aggregate: str) -> None:
        self._config = config
        self._files = {path.stem: path for path in sorted((folder / "states").glob("*.safetensors"))}
        if aggregate and AGGREGATE in self._files:
            self._files = {aggregate: self._files.pop(AGGREGATE), **self._files}
        for mode in config.baselines:
            if (path := folder / "baselines" / mode / "states" / f"{AGGREGATE}.safetensors").is_file():
                self._files[mode] = path

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self._files:
            raise KeyError(str(unknown("network", name, self._files)))
        site = next((site for site in self._config.roster if site.name == name), None)
        with ordinary():
            return load_network(self._files[name], name_of(architecture_of(self._config, site)))[0]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _config(experiment: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Of a dictionary, read as if it were in a file."""
    return load_text(write_yaml(plain_value(experiment, "")), "experiment", overrides)


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """Within, torch is as this project takes it to be; afterwards it is again as it was, its number of threads, too."""
    before = torch.get_num_threads()
    try:
        with ordinary():
            yield
    finally:
        torch.set_num_threads(before)
