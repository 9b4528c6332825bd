"""`fedloom export`: files that load in a process without fedloom, with the outputs of Result.predict."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom import Result, run
from fedloom.fusion.state import digest
from fedloom.sims.operations import export
from tests.sims.commands import Command, refused
from tests.sims.other_data import frame

SETTINGS = {
    "rounds": 1,
    "network": {"name": "mlp", "widths": [8]},
    "objective": "fedavg",
    "strategy": "fedavg",
    "engine": {"name": "inline", "device": "cpu"},
}
READ = """
import json, sys
import numpy as np

class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "fedloom":
            raise ImportError("fedloom is not here")

sys.meta_path.insert(0, Refuse())
path, inputs, out = sys.argv[1:]
x = np.load(inputs)
if path.endswith(".onnx"):
    import onnx, onnxruntime
    facts = {each.key: each.value for each in onnx.load(path).metadata_props}
    facts = {key: facts[key] if key in ("license", "digest") else json.loads(facts[key]) for key in
             ("license", "digest", "certificates", "inputs", "outputs", "split")}
    (outputs,) = onnxruntime.InferenceSession(path).run(None, {"inputs": x})
else:
    import torch
    extra = {"fedloom.json": ""}
    if path.endswith(".pt2"):
        network = torch.export.load(path, extra_files=extra).module()
    else:
        network = torch.jit.load(path, _extra_files=extra)
    facts = json.loads(extra["fedloom.json"])
    outputs = network(torch.from_numpy(x)).detach().numpy()
np.save(out, outputs)
print(json.dumps(facts))
"""


def read(path: Path, inputs: np.ndarray) -> tuple[dict, torch.Tensor]:
    """The metadata and the outputs of a file, in a process that cannot import fedloom."""
    given, out = path.with_name("inputs.npy"), path.with_name("outputs.npy")
    np.save(given, inputs)
    said = subprocess.run([sys.executable, "-c", READ, path, given, out], capture_output=True, text=True, cwd=path.parent)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout), torch.from_numpy(np.load(out))


def test_exported_files_load_without_fedloom(fedloom: Command, run: Path, tmp_path: Path):
    Result(run).unlearn("site-0001", request_id="withdrawn")
    files = {"--torch-export": tmp_path / "net.pt2", "--pt": tmp_path / "net.pt", "--onnx": tmp_path / "net.onnx"}
    said = fedloom("export", run, *(word for pair in files.items() for word in pair), "--license", "CC-BY-4.0")
    assert said.code == 0, said.err
    result = Result(run)
    images = result.examples("site-0000").x[:7]
    expected = result.predict(images, scores=True)
    for path in files.values():
        facts, outputs = read(path, (images.float() / 127.5 - 1).numpy())
        assert torch.allclose(outputs, expected, atol=1e-4), path
        assert (facts["license"], facts["certificates"]) == ("CC-BY-4.0", ["withdrawn"])
        assert facts["digest"] == digest(result.network.state_dict())
        assert facts["inputs"]["shape"] == ["batch", 1, 8, 8] and "pixel / 127.5 - 1" in facts["inputs"]["scale"]
        assert facts["outputs"]["names"] == result.class_names()
        assert facts["split"] == {"seed": 0, "validation": 0.1, "validation_limit": 1000}
    card = (tmp_path / "net.md").read_text()
    assert "| site-0001 | withdrawn |" in card and "| site-0000 | digits | 40 |" in card
    assert 'torch.export.load("net.pt2").module()' in card and "CC-BY-4.0" in card and "accuracy" in card


def test_exported_files_take_and_return_the_units_of_the_data(tmp_path: Path):
    random = np.random.default_rng(0)
    size, age = random.normal(size=90), 100 * random.normal(size=90)
    domain = frame(tmp_path, size=size, age=age, price=5000 + 1000 * size + 10 * age)
    sites = [{"domain": f"{domain}?target=price&task=regression", "count": 2}]
    result = run({**SETTINGS, "sites": sites, "run": {"root": str(tmp_path), "name": "prices"}})
    result.export(torch_export=tmp_path / "net.pt2")
    inputs = np.stack([size, age], axis=1).astype(np.float32)
    facts, outputs = read(tmp_path / "net.pt2", inputs)
    assert torch.allclose(outputs, result.predict(inputs), rtol=1e-4) and outputs.mean() > 1000
    assert facts["inputs"]["columns"] == ["size", "age"] and facts["outputs"]["names"] == ["price"]


def test_refused_exports(fedloom: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(fedloom("export", run), "name a file with --pt, --torch-export or --onnx")
    refused(fedloom("export", run, "--pt", tmp_path / "no" / "net.pt"), "--pt: the folder", "does not exist")
    refused(fedloom("export", run, "--pt", run / "net.pt"), "--pt:", "inside the folder of the run")
    refused(fedloom("export", run, "--pt", tmp_path / "net.pt", "--network", "smu"), "did you mean 'sum'")
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    refused(fedloom("export", run, "--onnx", tmp_path / "net.onnx"), "pip install 'fedloom[onnx]'")
    assert not list(tmp_path.glob("net.*"))
