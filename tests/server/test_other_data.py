"""Methods on other data than labelled images: real runs that train, forget with a certificate, or refuse in one line."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf import UserError
from fedloom.sims.api import run
from fedloom.sims.operations.verify import verify_certificate
from fedloom.sims.result import Result
from tests.sims import other_data

TRANSFORMER = "{name: transformer, width: 8, heads: 2, layers: 1}"
DATA: dict[str, tuple[Callable[[Path], str], str, str]] = {  # by name: how to make the domain, a network, a deeper one
    "features": (lambda _: "breast_cancer", "{name: mlp, widths: [12, 8]}", "{name: mlp, widths: [12, 12, 8]}"),
    "numbers": (lambda _: "diabetes", "{name: mlp, widths: [12, 8]}", "{name: mlp, widths: [12, 12, 8]}"),
    "labels": (other_data.labels, "{name: mlp, widths: [12, 8]}", "{name: mlp, widths: [12, 12, 8]}"),
    "sequence": (lambda _: "digits_by_rows", "{name: cnn1d, widths: [8, 8]}", "{name: cnn1d, widths: [8, 8, 8]}"),
    "windows": (lambda _: "digits_by_rows", TRANSFORMER, TRANSFORMER.replace("layers: 1", "layers: 2")),
    "tokens": (other_data.tokens, TRANSFORMER, TRANSFORMER.replace("layers: 1", "layers: 2")),
    "next": (other_data.next_tokens, TRANSFORMER, TRANSFORMER.replace("layers: 1", "layers: 2")),
}  # fmt: skip
METHODS = {
    "fedavg": ["strategy=fedavg"],
    "scaffold": ["strategy=scaffold"],
    "sum_aggregation": ["strategy=sum_aggregation", "objective.mode=exact"],
    "arithmetic": ["strategy=arithmetic"],
    "head_transfer": ["strategy=head_transfer"],
    "layer_selection": ["strategy=layer_selection"],
    "cla_ot": ["strategy={name: cla_ot, fusion: cla_ot, start: own, probe: {samples: 30}}"],
    "masks": ["strategy={name: fedavg, weighting: equal}", "federation.secure_aggregation=true", "evaluation.where=sites"],
    "noise": ["strategy=fedavg", "privacy={clip: 1.0, noise: 0.5}", "evaluation.where=sites"],
}
HIDDEN = ("masks", "noise")
OF_CLASSES = ("head_transfer", "layer_selection")
REFUSED = {
    ("layer_selection", "tokens"): "cannot be cut",
    ("layer_selection", "windows"): "cannot be cut",
    ("layer_selection", "sequence"): "layer selection needs",
    ("cla_ot", "sequence"): "cannot be fused into",
}


def trained(folder: Path, data: str, method: str, *more: str) -> Result:
    """Run a method for two rounds at three sites, the last of which has another network with cla_ot."""
    make, network, deeper = DATA[data]
    networks = f", networks: [{network}, {deeper}]" if method == "cla_ot" else ""
    sites = f"sites=[{{domain: '{make(folder)}', count: 3, samples: 60{networks}}}]"
    small = [
        "rounds=2",
        "training.batch=16",
        "training.rate=0.01",
        "data.test_limit=60",
        "engine.name=inline",
        "baselines=[]",
    ]
    if method in HIDDEN:
        small.append(f"data.standardise={'none' if data in ('tokens', 'next') else 'site'}")
    return run("digits", f"run.root={folder}/runs", "run.name=small", sites, f"network={deeper if networks else network}",
               *METHODS[method], *small, *more)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", DATA)
def test_a_method_trains_or_refuses_in_one_line(tmp_path: Path, data: str, method: str, blank_pictures: None) -> None:
    refusal = REFUSED.get((method, data))
    if data in ("numbers", "labels", "next") and method in OF_CLASSES:
        refusal = "takes classes, but the targets here are"
    if refusal:
        with pytest.raises(UserError, match=refusal) as caught:
            trained(tmp_path, data, method)
        assert "\n" not in str(caught.value)
        return
    result = trained(tmp_path, data, method)
    values = [value for row in result.metrics for table in _tables(row) for value in table.values()]
    assert values and all(math.isfinite(value) for value in values)


def _tables(row: dict) -> list[dict[str, float]]:
    return [row["accuracy"]] if "accuracy" in row else list(row["scores"].values())


@pytest.mark.parametrize("data", DATA)
def test_a_site_is_forgotten_with_a_certificate(tmp_path: Path, data: str, blank_pictures: None) -> None:
    result = trained(tmp_path, data, "sum_aggregation", "baselines=[]")
    certificate = result.unlearn("site-0001", request_id="r1")
    table, matches = verify_certificate(tmp_path / "runs/small/certificates/r1.json", tmp_path / "runs/small")
    assert matches, table
    assert certificate["sites"] == ["site-0001"]


@pytest.mark.parametrize("data", ["numbers", "labels"])
@pytest.mark.parametrize("method", ["feddf", "depthfl"])
def test_distillation_is_only_for_classes_and_tokens(tmp_path: Path, data: str, method: str) -> None:
    METHODS[method] = [f"strategy={method}"]
    with pytest.raises(UserError, match="but the targets here are") as caught:
        trained(tmp_path, data, method)
    assert "\n" not in str(caught.value)


def test_distillation_of_next_tokens_lowers_their_perplexity(tmp_path: Path) -> None:
    METHODS["feddf"] = ["strategy={name: feddf, steps: 60, rate: 0.01}", "training.epochs=8", "training.rate=0.1"]
    before, after = (next(iter(_tables(row)[0].values())) for row in trained(tmp_path, "next", "feddf").metrics)
    assert after < before < 13, "13 tokens"


def test_heads_of_numbers_are_not_computed_from_class_statistics(tmp_path: Path) -> None:
    result = trained(tmp_path, "numbers", "sum_aggregation")
    with pytest.raises(UserError, match="recalibration: heads are computed for classes only, but the targets here are num"):
        result.unlearn("site-0001", recalibrate=True)
