"""Write report.html: one self-contained page with the results of a run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.clients.protocol.packing import PACKINGS
from fedloom.conf.errors import UserError
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.layout import PLOTS, TABLE_FILES
from fedloom.server.run_folder.results_schema import seconds_of
from fedloom.server.run_folder.scores import headline as headline_of
from fedloom.server.run_folder.scores import metric_of
from fedloom.sims.report import plots
from fedloom.sims.report.curves import only_round, other_records
from fedloom.sims.report.errors import by_class_table, confusion_table, metrics_table
from fedloom.sims.report.forgetting import Forgotten, by_round, caption, forgetting_table, forgotten_sites, forgotten_table
from fedloom.sims.report.headline import all_domains, headline, never_predicted
from fedloom.sims.report.heads import exchanges, heads_table
from fedloom.sims.report.page import Details, Part, Picture, write_page
from fedloom.sims.report.results import accuracy_table, at_sites_table, costs_table, has_aggregate, traffic_table
from fedloom.sims.report.selection import methods_table, selections, sites_table
from fedloom.sims.report.sites import at_home, classes_table, data_table, has_classes, spread_table
from fedloom.sims.report.sites import sites_table as per_site_table
from fedloom.sims.report.tables import KINDS, Cell, Table, cut, file_name

SUMMARY_KEYS = {
    "experiment": str, "method": str, "seed": int, "rounds": int, "engine": str, "seconds": int | float,
    "sites": list, "status": str,
}  # fmt: skip
CAPTIONS = {
    "accuracy.png": "{metric} of the aggregated network on held-out validation examples, by round.",
    "sites.png": "Test {name} of each network on each domain. A site's own network should be good on that site's domain, "
    "the aggregated network on all domains.",
    "per_site.png": "{metric} on each site's own test examples; more than 12 sites are sorted.",
    "confusion.png": "Row: a true class. Column: the class that the network predicts. Darker: a larger share of the row.",
    "against.png": "Each dot is a group of test examples; a larger dot has more. Dots on the dashed line are right.",
    "classes.png": "Training examples of each class at each site. A larger dot means more examples.",
    "layers.png": "Probability that each group of layers is shared: a row for each site, rounds from left to right.",
    "heads.png": "Accuracy of every site's head on every site's extractor, without further training. Dark cells outside the "
    "frames mean that heads can be exchanged.",
}
APART = {
    "accuracy.png": "{metric} of the sites' own networks on held-out validation examples of their own domains, by round.",
    "sites.png": "Test {name} of each site's own network on each domain. A method's row is the mean over its sites.",
}
BROKEN = " Dashed lines: the baselines and the networks of other architectures"
GREY = " Grey bars: the baselines and the networks of other architectures"
GUARANTEE = (
    "What subtraction guarantees: the sums are exact integers. So subtracting a site's contribution leaves, bit for bit, "
    "the sum that never had it: S - φ_k, for the sum S and the contribution φ_k of site k."
)
LIMITS = (
    "What subtraction does not guarantee: shared parameters and the other sites' networks were trained while site k "
    "participated. Subtraction does not change them, so they may still hold information from site k. The values above "
    "are measurements on test examples. They do not prove that this information is gone."
)
NO_TRACES = (
    "Each site started from a network that had seen no data, and received nothing from other sites. So the result without "
    "site k is the same as if site k had never participated."
)


def write_report(folder: Path, pictures: Iterable[str] = (), tables: Iterable[str] = ()) -> Path:
    """Draw the plots of the run in `folder`, write its report.html, and return the path of the page.

    Args:
        folder: The run's folder.
        pictures: Kinds of files of the plots besides PNG (canvas.KINDS), in the folder `plots`.
        tables: Kinds of files of the tables (tables.KINDS), in the folder `tables`.

    Raises UserError naming the file if config.yaml, metrics.jsonl or summary.json is missing or damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder; name the folder of a run, such as runs/digits")
    config = _read(folder / "config.yaml", "name the folder of a run, such as runs/digits")
    summary, metrics = _read_summary(folder / "summary.json"), _read_metrics(folder / "metrics.jsonl")
    try:
        gone = forgotten_sites(folder, summary)
        summary["unlearned"], baselines = [forgotten.site for forgotten in gone], other_records(folder, metrics)
        captions = _captions(summary, metrics, baselines)
        RunFolder(folder).note_written([f"{PLOTS}/{Path(name).stem}.{kind}" for name in captions for kind in plots.KINDS])
        drawn = plots.draw_all(folder, metrics, summary, baselines, pictures, by_round(gone))
        shown = {path.name: Picture(path, captions[path.name]) for path in drawn}
        sections = _sections(summary, metrics, config, shown, gone)
        written = {f"{TABLE_FILES}/{file_name(part.title.partition(':')[0] or heading)}": part
                   for heading, parts in sections for part in parts if isinstance(part, Table)}  # fmt: skip
        RunFolder(folder).note_written([f"{name}.{kind}" for name in written for kind in KINDS])
        for name, table in written.items():
            table.write(folder / name, tables)
        return write_page(folder / "report.html", f"Fedloom: {folder.resolve().name}", sections, sorts=True)
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{folder}: the run's results are damaged ({error!r}); run the experiment again") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder / 'plots'}: cannot be written ({error.strerror})") from None


def _captions(
    summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, Any]
) -> dict[str, str]:
    """Return the caption of each picture, by its file name."""
    metric = metric_of(summary, metrics)
    captions = {name: text.format(metric=metric.caption, name=metric.title)
                for name, text in (CAPTIONS if has_aggregate(summary) else {**CAPTIONS, **APART}).items()}  # fmt: skip
    if has_classes(summary):
        captions["per_site.png"] = f"Left: {captions['per_site.png']} Right: accuracy by class."
    broken = f"{BROKEN if only_round(metrics, baselines) is None else GREY}, on {all_domains(summary)}." if baselines else ""
    return {**captions, "accuracy.png": captions["accuracy.png"] + broken, "forgetting.png": caption(summary)}


def _sections(
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    config: str,
    pictures: Mapping[str, Picture],
    gone: list[Forgotten],
) -> list[tuple[str, list[Part]]]:
    accuracy: list[Part] = [accuracy_table(summary)] if headline_of(summary) else []
    accuracy += metrics_table(summary)
    different: list[Part] = [at_sites_table(summary)] if summary.get("at_sites") else []
    different += [costs_table(summary)] if summary.get("costs") else []
    forgotten: list[Part] = [forgetting_table(summary)] if summary.get("forgotten") else []
    heads: list[Part] = [heads_table(matrices)] if (matrices := exchanges(summary)) else []
    selection: list[Part] = [methods_table(chosen), sites_table(chosen[0])] if (chosen := selections(summary)) else []
    details = Details("Configuration", config)
    known = [site.site for site in gone if site.shown == "no"]
    sections: list[tuple[str, list[Part]]] = [
        ("", [headline(summary, metrics, known), *_warnings(summary), *([forgotten_table(gone)] if gone else [])]),
        ("The run", [_run_table(summary, metrics), data_table(summary), *_pictures(pictures, "classes.png"), details]),
        ("Training", [*_pictures(pictures, "accuracy.png"), *_dropped(metrics), *traffic_table(metrics)]),
        (f"Test {metric_of(summary).title}", [*accuracy, *different, *_pictures(pictures, "sites.png")]),
        ("Site by site", [*_at_home(summary), *_pictures(pictures, "per_site.png")]),
        ("Class by class", [*by_class_table(summary), *confusion_table(summary), *_pictures(pictures, "confusion.png")]),
        ("Predicted against true", _pictures(pictures, "against.png")),
        ("Privacy", [*_privacy(summary, metrics)]),
        ("Exchanged heads", [*heads, *_pictures(pictures, "heads.png")]),
        ("Layer selection", [*selection, *_pictures(pictures, "layers.png")]),
        ("Forgetting", [*forgotten, *_pictures(pictures, "forgetting.png")]),
        ("Exactness", [*_checks(summary), *_guarantee(summary)]),
        ("Digest", _digest(summary)),
    ]
    return [(heading, parts) for heading, parts in sections if parts]


def _privacy(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Part]:
    if not (summary.get("privacy") or any(record.get("epsilon") for record in metrics)):
        return []
    from fedloom.sims.report.privacy import privacy_parts  # imported only where something is hidden

    return [*privacy_parts(summary, metrics)]


def _at_home(summary: Mapping[str, Any]) -> list[Part]:
    if not summary.get("per_site"):
        return []
    spread = [spread_table(summary)] if any(len(result["sites"]) > 1 for result in at_home(summary).values()) else []
    again = len(at_home(summary)) == 1 and by_class_table(summary)  # the report has these values below
    return [*spread, per_site_table(summary), *([] if again else classes_table(summary))]


def _run_table(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[key, str(summary[key])] for key in ("experiment", "method", "seed", "rounds", "engine", "status")]
    if packing := PACKINGS.get(summary.get("packed", "")):
        rows += [["packed updates", f"{summary['packed']}: {packing.error}; sums are exact sums of the packed updates"]]
    if stop := summary.get("stopped"):
        rows += [["stopped", f"after round {stop['round']}: {stop.get('reason', '')}"]]
    return Table("", ["what", "value"], [*rows, *_resources(summary, metrics)])


def _resources(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    """Return rows with the run's seconds and, where recorded, those of start-up and rounds, and the server's peak memory."""
    resources = summary.get("resources") or {}
    rows: list[list[Cell]] = [["seconds", f"{summary['seconds']:.1f}"]]
    if "start_up" in resources:
        rows.append(["of these, start-up", f"{resources['start_up']:.1f}"])
    if metrics:
        rows.append(["seconds of the rounds", f"{seconds_of(metrics):.1f}"])
    if "peak_memory" in resources:
        rows.append(["peak memory of the server, MB", round(resources["peak_memory"] / 1e6)])
    return rows


def _dropped(metrics: Sequence[Mapping[str, Any]]) -> list[Part]:
    lost = [(r["round"], site, why) for r in metrics for site, why in (r.get("dropped") or {}).items()]
    rows, note = cut([[round, site, why] for round, site, why in lost], "dropped replies")
    return [Table("Dropped replies", ["round", "site", "reason"], rows, note)] if rows else []


def _checks(summary: Mapping[str, Any]) -> list[Part]:
    rows = [[name.replace("_", " "), "holds" if ok else "FAILED"] for name, ok in (summary.get("checks") or {}).items()]
    return [Table("Checked in this run", ["check", "result"], rows)] if rows else []


def _guarantee(summary: Mapping[str, Any]) -> list[Part]:
    if not summary.get("forgotten"):
        return []
    exact = (summary.get("checks") or {}).get("subtraction_exact", True)
    limits = NO_TRACES if summary.get("traces") == {} else LIMITS
    return [GUARANTEE, limits] if exact else [LIMITS]


def _warnings(summary: Mapping[str, Any]) -> list[Part]:
    failed = [name.replace("_", " ") for name, ok in (summary.get("checks") or {}).items() if not ok]
    warning = f"Warning: a check FAILED: {', '.join(failed)}. Do not rely on this run's exactness." if failed else ""
    return [line for line in (warning, never_predicted(summary)) if line]


def _digest(summary: Mapping[str, Any]) -> list[Part]:
    rows = [[name, str(value)] for name, value in (summary.get("digest") or {}).items()]
    note = "Runs with the same digest have exactly equal results."
    return [Table("", ["state", "SHA-256"], rows, note)] if rows else []


def _pictures(pictures: Mapping[str, Picture], name: str) -> list[Part]:
    return [pictures[name]] if name in pictures else []


def _read(path: Path, cure: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {cure or _resume(path)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; {cure or _resume(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _resume(path: Path) -> str:
    return f"`fedloom resume {path.parent}` continues the run, or writes this file again"


def _object(text: str, path: Path, place: str = "") -> dict[str, Any]:
    where = f"{path}{place}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: damaged JSON ({error}); {_resume(path)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: is not a JSON object; {_resume(path)}")
    return value


def _read_summary(path: Path) -> dict[str, Any]:
    summary = _object(_read(path), path)
    for key, kind in SUMMARY_KEYS.items():
        if not isinstance(summary.get(key), kind):
            raise UserError(f"{path}: '{key}' is missing or of the wrong type; {_resume(path)}")
    return summary


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = enumerate(_read(path).splitlines(), start=1)
    return [_object(line, path, f" line {number}") for number, line in lines if line.strip()]
