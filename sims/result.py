"""A run's results, read from its folder, and what can be done with them."""

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.clients.networks import form_of
from fedloom.clients.training.torch_setup import as_usual
from fedloom.conf.errors import UserError, for_python
from fedloom.conf.schema import Config
from fedloom.conf.values import shortened
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.folder import AGGREGATE, RunFolder, read_config
from fedloom.server.run_folder.scores import headline, metric_of
from fedloom.sims.networks import Networks
from fedloom.sims.operations.export import ExportOrder, export
from fedloom.sims.operations.predictions import evaluated, examples_of, measured, predicted, standardisation_of
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.curves import curve_rows, other_records
from fedloom.sims.report.results import accuracy_table
from fedloom.sims.tracking.numbers import site_numbers

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result:
    """A run, read from its folder. `Result("runs/digits")` opens an earlier one.

    Raises UserError if the folder is not a run.
    """

    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "folder", path_of(folder).resolve())
        read_config(self.folder)

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return read_config(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: `status`, `sites`, `accuracy`, `forgotten`, `digest`, ..."""
        return RunFolder(self.folder).summary()

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Test accuracy from 0 to 1 by network and domain. The domain `union` has the images of all domains."""
        return self.summary.get("accuracy") or {}

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """The configured metrics on test examples by metric, network and domain; the first configured one comes first."""
        return self.summary.get("scores") or {"accuracy": self.accuracy}

    @property
    def per_site(self) -> dict[str, Any]:
        """The first metric on the sites' own test examples, of `aggregate`, `own` (each site's) and baselines by mode.

        Each has `mean`, `deviation`, `deciles`, `worst`, `best`, `classes` and `sites`, as in summary.json.
        """
        return self.summary.get("per_site") or {}

    @property
    def class_counts(self) -> dict[str, dict[int, int]]:
        """The number of training examples by site and class; empty if the server does not have the data."""
        counts = self.summary.get("classes") or {}
        return {site: {int(name): number for name, number in numbers.items()} for site, numbers in counts.items()}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record of each committed round.

        Among others: `round`, `replies`, `dropped` (the reason by site), `loss` (the training loss by site), `train_loss`
        (their mean), `accuracy` or `scores` (on validation examples), `bytes` (to and from each site) and `seconds`.
        """
        return list(RunFolder(self.folder).metrics().values())

    @property
    def networks(self) -> "Networks":
        """The run's networks by name, as in `accuracy`. Each access reads a network from its file."""
        return Networks(self.folder, self.config, str(self.summary.get("aggregate") or ""))

    @property
    def network(self) -> nn.Module:
        """The aggregated network in evaluation mode, after the last committed round.

        Raises UserError if the run has no such network.
        """
        if (name := self._aggregate) not in self.networks:
            raise UserError(f"{self.folder}: has no aggregated network; `networks` lists the available ones")
        return self.networks[name]

    @property
    def report(self) -> Path:
        """The path of report.html: the page with tables and pictures."""
        return self.folder / "report.html"

    def table(self, sites: bool = False) -> "pandas.DataFrame":
        """Return `metrics` as a table with a row for each round, and the number of dropped sites.

        `sites`: a row for each round and site, with the site's bytes, training loss and, if sites measure
        (evaluation.where=sites), validation metrics.
        """
        import pandas

        if sites:
            names = {site.name for site in self.config.roster}
            rows = [{"round": record["round"], "site": site, **numbers} for record in self.metrics
                    for site, numbers in site_numbers(record, names).items()]  # fmt: skip
            return pandas.DataFrame(rows, columns=None if rows else ["round", "site"]).set_index(["round", "site"])
        records = [{**record, "dropped": len(record.get("dropped") or {})} for record in self.metrics]
        table = pandas.json_normalize(records)
        return table.set_index("round") if records else table

    def curves(self) -> "pandas.DataFrame":
        """Return validation metrics over rounds, also of baselines: a row for each network, metric, domain and round."""
        import pandas

        name, metrics = self._aggregate, self.metrics
        rows = curve_rows(name, metrics, other_records(self.folder, metrics))
        return pandas.DataFrame(rows, columns=["network", "metric", "domain", "round", "value"])  # pyright: ignore

    def open_ledger(self) -> Ledger:
        """Open the ledger of contributions for reading: `with result.open_ledger() as ledger: list(ledger.events())`."""
        return Ledger.open(self.folder, server=False)

    def measure(self, network: nn.Module) -> dict[str, float]:
        """Return the first metric of any network on test examples by domain, as in `scores`; of classes: the accuracy.

        The network takes inputs as the run's networks do: images [n, c, h, w], float32 in [-1, 1], with the run's channels
        and size; features are standardised as in the run (data.standardise=sites). It returns outputs [n, outputs].

        Raises:
            UserError: The network fails on the run's test examples, or returns something else.
        """
        by = standardisation_of(self.config, self.folder, "")
        evaluator = Evaluator(self.config).standardising(lambda: by)
        with as_usual():
            return measured(
                self.config, network, lambda copied: evaluator.headline("test", network=copied.to(evaluator.device))
            )

    def class_names(self) -> list[str]:
        """Return the names of the network's outputs in order: of classes or labels; the number of one without a name."""
        names = self.summary.get("class_names") or {}
        return [names.get(str(number), str(number)) for number in range(form_of(self.config).outputs)]

    def predict(
        self, inputs: Any, *, network: str = "", site: str = "", scores: bool = False, probabilities: bool = False
    ) -> Tensor:
        """Return a network's predictions for inputs, such as `result.examples(site).x`.

        Args:
            inputs: Images [n, c, h, w], uint8 (0 to 255), or float32 as the network takes them, in [-1, 1]: `x * 2 - 1` of
                images in [0, 1]. Other ranges give a warning. Features, sequences and arrays in the data's own units: they
                are standardised as in the run. For a run on a table also a pandas table, a dict of columns or a table's
                path, with the columns by name.
            network: A name in `networks`; empty: the aggregated network.
            site: The site whose head answers, if sites have heads of their own (data.heads), or whose mean and deviation
                apply (data.standardise=site).
            scores: Return the network's raw outputs [n, outputs] instead.
            probabilities: Return the probability of each class or label [n, outputs] instead.

        Returns:
            The class numbers, int64 [n], in the order of `class_names`; for several labels, bool [n, labels]; for numbers,
            float32 [n, outputs] in the targets' unit.

        Raises:
            UserError: The run has no such network or site, or the inputs do not fit.
        """
        return predicted(self.config, self._named(network), inputs, site, scores, probabilities, self.folder)

    def evaluate(self, data: Any, metrics: Any = (), *, network: str = "", site: str = "") -> dict[str, float]:
        """Return the value of each metric of a network on any data.

        Args:
            data: Examples such as `result.examples(site)`, or a pair (inputs, targets).
            metrics: As in the key evaluation.metrics, one or a list, also classes; empty: those of the run.
            network: A name in `networks`; empty: the aggregated network.
            site: The site whose head answers, if sites have heads of their own (data.heads).

        Raises:
            UserError: A metric is unknown, or does not fit the targets.
        """
        return evaluated(self.config, self._named(network), data, metrics, site, self.folder)

    def examples(self, site: str, split: str = "test") -> Examples:
        """Return a site's own examples: `x` and `y` of the split "train", "validation" or "test".

        Raises UserError for an unknown site or split, or if this machine does not have the data.
        """
        return examples_of(self.config, site, split)

    @for_python
    def export(
        self,
        *,
        pt: str | os.PathLike[str] | None = None,
        torch_export: str | os.PathLike[str] | None = None,
        onnx: str | os.PathLike[str] | None = None,
        network: str = "",
        site: str = "",
        license: str = "",
    ) -> list[Path]:
        """Write a network to files that load without fedloom, with a model card, and return the paths.

        The files have the outputs of `predict(..., scores=True)`. Their metadata say what the network takes and returns.

        Args:
            pt: A file for TorchScript (`torch.jit.load`), which C++ reads, too.
            torch_export: A file for `torch.export.load`.
            onnx: An ONNX file. Needs `fedloom[onnx]`.
            network: A name in `networks`; empty: the aggregated network.
            site: As in `predict`.
            license: The licence of the network, for metadata and card.

        Raises:
            UserError: A file cannot be written, or the network cannot be exported.
        """
        files = [Path(path) if path else None for path in (pt, torch_export, onnx)]
        return exported(self, ExportOrder(*files, license=license, site=site), network)

    @property
    def _aggregate(self) -> str:
        return str(self.summary.get("aggregate") or AGGREGATE)

    def _named(self, network: str) -> nn.Module:
        return self.networks[network] if network else self.network

    @for_python
    def unlearn(
        self,
        sites: str | Sequence[str],
        *,
        request_id: str = "",
        reason: str = "",
        by: str = "",
        repair: int = 0,
        restore: int = 0,
        back: float | None = None,
        recalibrate: bool = False,
        rollback: bool = False,
        retrain: bool = False,
        without_data: bool = False,
        progress: bool = False,
    ) -> dict[str, Any]:
        """Forget sites, like `fedloom unlearn`, and return the certificate, which is also in certificates/.

        If another process runs the training, it fulfils the request between rounds; this returns {"request", "state"} then.

        Args:
            sites: The names of one or several sites.
            request_id: The name of the request; empty: a new one. The same name again returns the first result.
            reason: For the ledger and the certificate.
            by: Who asks, for the ledger and the certificate.
            repair: Rounds of training without the sites, afterwards.
            restore: Rounds in which the other sites train the aggregate as one network.
            back: The share of the way by which the aggregate moves back to its initial state before that; None: half.
            recalibrate: Compute a new head from statistics of the other sites, without training.
            rollback: Go back to the round before the sites joined, and train again.
            retrain: Train a network without the sites, for comparison.
            without_data: Forget even if the images for measuring are missing.
            progress: Show the progress.

        Raises:
            UserError: For sites that are unknown or already forgotten.
            FailedError: The certificate is missing or does not match the run.
        """
        names = [sites] if isinstance(sites, str) else [str(site) for site in sites]
        request = UnlearningRequest(
            names, request_id, reason, repair=int(repair), retrain=retrain, rollback=rollback, recalibrate=recalibrate,
            without_data=without_data, by=by, restore=int(restore), back=back,
        )  # fmt: skip
        with as_usual():
            return unlearn(self.folder, request, listener=listener_for(quiet=not progress)).certificate

    def __fspath__(self) -> str:
        """Return the folder, so that a result stands for it: `compare([result])`, `resume(result)`."""
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r})"

    def __str__(self) -> str:
        """Return the status, method, accuracy and folder of the run as a line."""
        summary = self.summary
        scores = {name: shares["union"] for name, shares in headline(summary).items() if "union" in shares}
        name = str(summary.get("aggregate") or next(iter(scores), ""))
        metric = metric_of(summary)
        good = f", test {metric.title} {metric.text(scores[name])} ({name})" if name in scores else ""
        return (
            f"{summary.get('status', 'begun')}: {summary.get('method', self.config.strategy['name'])}{good}: {self.folder}"
        )

    def _repr_html_(self) -> str:
        """Return the accuracies and the folder as HTML, for notebooks."""
        summary = self.summary
        table = accuracy_table(summary).html() if headline(summary) else ""
        state = html.escape(f"{summary.get('status', 'begun')}: {self.folder}")
        return f"{table}<p>{state}</p>"


def path_of(folder: object) -> Path:
    """Return a run's folder as a path. Raises UserError for anything that is not a path."""
    if not isinstance(folder, str | os.PathLike) or "\0" in os.fsdecode(folder):
        raise UserError(f"folder: got {shortened(folder)}, takes the path of a run's folder, such as 'runs/digits'")
    return Path(os.fsdecode(folder)).expanduser()


def exported(result: Result, order: ExportOrder, network: str = "") -> list[Path]:
    """Export a network as `Result.export` does. Errors name the options of the command line."""
    with as_usual():
        return export(result.folder, result.config, network or result._aggregate, result._named(network), order)
