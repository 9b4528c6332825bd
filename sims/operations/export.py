"""Write a network of a run to files that load without Fedloom, and a model card next to them."""

import importlib.util
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import outputs
from fedloom.clients.data.form import IMAGE, TOKENS
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.data.standardise import Standardisation, first_schema
from fedloom.clients.networks import HeadView, form_of
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import Facts, facts_of
from fedloom.conf.plugins import error_summary
from fedloom.conf.schema import Config
from fedloom.fusion.state import digest
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.layout import CERTIFICATES
from fedloom.server.run_folder.scores import SCORES, headline, metric_of
from fedloom.sims.operations.network_files import check_out, check_report
from fedloom.sims.operations.predictions import site_of, standardisation_of
from fedloom.sims.report.forgetting import forgotten_sites, forgotten_table
from fedloom.sims.report.sites import data_table
from fedloom.sims.report.tables import Table

METADATA = "fedloom.json"  # the name of the metadata in .pt and .pt2 files; ONNX has a property for each key
MOST_NAMES = 40  # of outputs in a card
MOST_DIFFERENCE = 1e-4  # between outputs of a file and of the network
SCALES = {IMAGE: "float32 from -1 to 1; of 8 bits: pixel / 127.5 - 1", TOKENS: "int64 numbers of tokens; 0 is padding"}
LOADING = {
    "--torch-export": 'import torch\nnetwork = torch.export.load("{file}").module()\noutputs = network(inputs)',
    "--pt": 'import torch\nnetwork = torch.jit.load("{file}")  # TorchScript\noutputs = network(inputs)',
    "--onnx": 'import onnxruntime\nsession = onnxruntime.InferenceSession("{file}")\n'
    '(outputs,) = session.run(None, {{"inputs": inputs}})  # a NumPy array',
}


@dataclass(frozen=True)
class ExportOrder:
    """What to export.

    Attributes:
        pt: The file for TorchScript, which C++ reads, too; None: none.
        torch_export: The file for torch.export's ExportedProgram; None: none.
        onnx: The ONNX file; None: none.
        license: The licence of the network, for the metadata and the card.
        site: The site whose head answers, or whose mean and deviation apply, as in `Result.predict`.
    """

    pt: Path | None = None
    torch_export: Path | None = None
    onnx: Path | None = None
    license: str = ""
    site: str = ""

    @property
    def files(self) -> dict[str, Path]:
        """The files by option."""
        files = {"--torch-export": self.torch_export, "--pt": self.pt, "--onnx": self.onnx}
        return {option: path for option, path in files.items() if path}


class Plain(nn.Module):
    """A network that takes inputs in the data's units, and returns numbers in the targets' unit."""

    input_mean: Tensor
    input_deviation: Tensor
    target_mean: Tensor
    target_deviation: Tensor

    def __init__(self, network: nn.Module, outputs: slice, by: Standardisation | None, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs
        self.scaled, self.numbers = bool(by and by.inputs), bool(by and by.targets)
        for name, pair in (("input", by and by.inputs), ("target", by and by.targets)):
            for what, columns in zip(("mean", "deviation"), pair or (), strict=False):
                whole = name == "input" and len(columns) == torch.Size(shape).numel()
                self.register_buffer(f"{name}_{what}", columns.view(shape) if whole else columns)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scaled:
            scale = torch.where(self.input_deviation > 0, 1.0 / self.input_deviation, 0.0)
            inputs = ((inputs.double() - self.input_mean) * scale).float()
        results = self.network(inputs)[..., self.outputs]
        return (results.double() * self.target_deviation + self.target_mean).float() if self.numbers else results


def export(folder: Path, config: Config, name: str, network: nn.Module, order: ExportOrder) -> list[Path]:
    """Write the files of the order and a model card, and return their paths. `name`: the network's, in the run.

    Raises:
        UserError: No file is named, a file cannot be written, a package is missing, or the network cannot be exported.
    """
    if not order.files:
        raise UserError("export: name a file with --pt, --torch-export or --onnx")
    for option, path in order.files.items():
        check_out(path, option=option)
    if order.onnx and not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise UserError("--onnx: needs the packages onnx and onnxscript: pip install 'fedloom[onnx]'")
    card = check_report(next(iter(order.files.values())))
    if config.data.heads != "shared" and not order.site:
        raise UserError(f"--site: data.heads is {config.data.heads}, so name the site whose head answers")
    head = outputs(config, site_of(config, order.site).spec) if order.site else slice(None)
    HeadView(network, head, config.evaluation.statistics).eval()  # sets how BatchNorm measures
    plain = Plain(network, head, standardisation_of(config, folder, order.site), form_of(config).shape)
    facts = _facts(folder, config, name, network, order)
    for option, path in order.files.items():
        try:
            _write(option, path, plain, form_of(config).random(3), facts)
        except UserError:
            raise
        except Exception as error:
            path.unlink(missing_ok=True)
            raise UserError(
                f"{option}: the network cannot be exported ({error_summary(error)}); try another option"
            ) from error
    card.write_text(_card(folder, facts, order), encoding="utf-8")
    return [*order.files.values(), card]


def _write(option: str, path: Path, network: Plain, inputs: Tensor, facts: Mapping[str, Any]) -> None:
    """Write a file, and compare its outputs with the network's. Raises UserError if they differ."""
    extra = {METADATA: json.dumps(facts, indent=2)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, which the comparison below checks
        if option == "--pt":
            traced: Any = torch.jit.trace(network, inputs, check_trace=False)
            traced.save(str(path), _extra_files=extra)
            loaded = torch.jit.load(str(path))
        else:
            program = torch.export.export(network, (inputs,), dynamic_shapes={"inputs": {0: torch.export.Dim("batch")}})
            loaded = program.module()
            if option == "--onnx":
                _write_onnx(path, program, inputs, facts)
            else:
                torch.export.save(program, path, extra_files=extra)
        more = torch.cat([inputs, inputs.flip(0)])
        if not torch.allclose(loaded(more), network(more), rtol=MOST_DIFFERENCE, atol=MOST_DIFFERENCE):
            raise UserError(f"{option}: the exported network has other outputs, as its code depends on values or on the "
                            "number of examples; try another option")  # fmt: skip


def _write_onnx(path: Path, program: torch.export.ExportedProgram, inputs: Tensor, facts: Mapping[str, Any]) -> None:
    made = torch.onnx.export(program, (inputs,), dynamo=True, verbose=False)
    assert made is not None
    texts = {key: item if isinstance(item, str) else json.dumps(item) for key, item in facts.items()}
    made.model.metadata_props.update(texts)
    made.save(path)


def _facts(folder: Path, config: Config, name: str, network: nn.Module, order: ExportOrder) -> dict[str, Any]:
    """Return the metadata of a file."""
    summary, form, schema = RunFolder(folder).summary(), form_of(config), first_schema(config)
    names, own = summary.get("class_names") or {}, name not in config.baselines
    return {
        "made_by": f"fedloom {metadata.version('fedloom')}",
        "run": folder.name,
        "network": name,
        "architecture": config.network,
        "split": asdict(SplitRule.of(config)),
        "license": order.license,
        "digest": digest(network.state_dict()),
        "certificates": [path.stem for path in sorted((folder / CERTIFICATES).glob("*.json"))] if own else [],
        "inputs": {
            "kind": form.kind,
            "shape": ["batch", *form.shape],
            "scale": SCALES.get(form.kind, "float32, in the data's own units"),
            "columns": list(schema.columns),
        },
        "outputs": {
            "task": schema.task,
            "shape": ["batch", *([form.length] if form.each_step else []), form.outputs],
            "names": [names.get(str(number), str(number)) for number in range(form.outputs)],
        },
    }


def _card(folder: Path, facts: Mapping[str, Any], order: ExportOrder) -> str:
    """Return the model card, in Markdown."""
    summary, inputs, targets = RunFolder(folder).summary(), facts["inputs"], facts["outputs"]
    gone = forgotten_sites(folder, summary)
    columns = [["inputs", f"{inputs['kind']} [{', '.join(map(str, inputs['shape']))}], {inputs['scale']}"],
               ["columns", ", ".join(inputs["columns"])],
               ["outputs", f"{targets['task']} [{', '.join(map(str, targets['shape']))}]"],
               ["their names", ", ".join(targets["names"][:MOST_NAMES]) + ", ..." * (len(targets["names"]) > MOST_NAMES)],
               *([key, facts[key]] for key in ("license", "run", "network", "digest", "made_by"))]  # fmt: skip
    parts = [f"# {facts['network']}, of the run {facts['run']}\n"]
    parts += [f"```python\n{LOADING[option].format(file=path.name)}\n```\n" for option, path in order.files.items()]
    parts += [Table("The network", ["what", "value"], [row for row in columns if row[1]]).markdown()]
    parts += [data_table(summary).markdown()] if summary.get("sites") else []
    parts += [table.markdown() for table in _scores(summary, facts["network"])]
    parts += [forgotten_table(gone).markdown() if gone else "No site was forgotten.\n"]
    return "\n".join(parts)


def _scores(summary: Mapping[str, Any], name: str) -> list[Table]:
    """Return, as a list, a table of a network's metrics on test examples by domain; no table if it was not measured."""
    first: Facts = metric_of(summary)
    by_metric = {facts_of(metric): table for metric, table in (summary.get(SCORES) or {}).items()}
    measured = {facts: table[name] for facts, table in (by_metric or {first: headline(summary)}).items() if name in table}
    domains = dict.fromkeys(domain for values in measured.values() for domain in values)
    rows = [[domain, *(facts.text(values.get(domain)) for facts, values in measured.items())] for domain in domains]
    return [Table("Test examples", ["domain", *(facts.title for facts in measured)], rows)] if rows else []
