"""Show the first metric at single sites, and the sites' classes, as tables and plots."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedloom.conf.metrics import ACCURACY, Facts, facts_of
from fedloom.server.run_folder.scores import metric_of, spot
from fedloom.sims.report.canvas import (
    INK,
    PALETTE,
    new_figure,
    new_panels,
    percent_axis,
    plain,
    short,
    value_axis,
    within_bounds,
)
from fedloom.sims.report.results import aggregate, titled
from fedloom.sims.report.tables import Table, cut, percent, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMED = 12  # sites with their names in the picture of accuracy by site
MOST_ROWS = 40  # sites in the picture of classes
SITES_OWN, OWN = "the sites' own", PALETTE[6]  # their networks, in no colour of a domain
MOST_CLASSES, MOST_NUMBERS = 50, 20  # named on an axis; numbered on a narrow one
FEW_IMAGES = 10  # with fewer, a site's accuracy changes in steps of more than 10%
MAX_NAME_IN_TABLE, MAX_NAME_ON_AXIS = 60, 18  # characters of a class's name: in a table, on an axis
MAX_DOT_AREA = 260.0  # area of the largest dot


def at_home(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the summary's results on the sites' own test examples, by network (server.run.final_evaluation)."""
    names = {"aggregate": aggregate(summary) or "aggregate", "own": SITES_OWN}
    return {names.get(name) or str(name): result for name, result in (summary.get("per_site") or {}).items()}


def data_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the sites with their domains and numbers of training examples."""
    keys = {"name": "site", "domain": "domain", "part": "part", "samples": "training examples"}
    if not any("part" in site for site in summary["sites"]):
        del keys["part"]
    rows, note = cut([[site.get(key, "") for key in keys] for site in summary["sites"]], "sites")
    return Table("Sites", list(keys.values()), rows, note)


def spread_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the first metric over the sites by network: mean, standard deviation, worst, deciles, best."""
    rows, metric, titles = [], metric_of(summary), titled(summary)
    for name, result in at_home(summary).items():
        low, middle, high = (result["deciles"][index] for index in (0, 4, 8))
        ends = (result[end] or {} for end in ("worst", "best"))
        worst, best = ((metric.text(spot(end)), titles.get(end.get("site", "-"), end.get("site", "-"))) for end in ends)
        rows.append([name, len(result["sites"]), metric.text(result["mean"]), metric.text(result["deviation"]), *worst,
                     *map(metric.text, (low, middle, high)), *best])  # fmt: skip
    columns = ["network", "sites", "mean", "deviation", "worst", "at", "10%", "median", "90%", "best", "at"]
    note = ("Every site has the same weight. deviation: of these sites (divided by n). 10%: a tenth of the sites are below "
            "this value. summary.json has all deciles.")  # fmt: skip
    return Table(
        "On each site's own test examples", columns, rows, _looked_at(summary) + _coarse(summary) + _lacking(summary) + note
    )


def sites_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the first metric by site and network, sorted by the first network's value, worst first."""
    networks, metric, titles = at_home(summary), metric_of(summary), titled(summary)
    first = next(iter(networks.values()))["sites"]
    values = {name: spot(site) for name, site in first.items()}
    worth = {name: metric.worth(value) for name, value in values.items() if value is not None}
    names = sorted({name: None for result in networks.values() for name in result["sites"]},
                   key=lambda name: worth.get(name, math.inf))  # fmt: skip
    images = {name: each["images"] for result in networks.values() for name, each in result["sites"].items()}
    rows = [[titles.get(name, name), images[name],
             *(metric.text(spot(result["sites"].get(name, {}))) for result in networks.values())]
            for name in names]  # fmt: skip
    kept, note = cut(rows, "sites")
    return Table("Site by site, the worst first", ["site", "test examples", *networks], kept, note)


def classes_table(summary: Mapping[str, Any]) -> list[Table]:
    """Return, as a list, a table of accuracy by class on all measured sites' test examples; no table if none is reported."""
    networks = {name: result["classes"] for name, result in at_home(summary).items() if result["classes"]}
    numbers = sorted({number for classes in networks.values() for number in classes}, key=int)
    names = summary.get("class_names") or {}
    rows = [[number, *([shortened(names.get(number, "-"), MAX_NAME_IN_TABLE)] if names else []),
             *(percent(_share(classes.get(number))) for classes in networks.values())] for number in numbers]  # fmt: skip
    kept, note = cut(rows, "classes")
    return [Table("Class by class", ["class", *(["name"] if names else []), *networks], kept, note)] if networks else []


def has_classes(summary: Mapping[str, Any]) -> bool:
    """Return whether the sites report accuracies by class."""
    return any(result["classes"] for result in at_home(summary).values())


def few_sites(networks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all measured sites if a picture has room for them, else an empty list."""
    names = list(dict.fromkeys(site for result in networks for site in result["sites"]))
    return names if len(names) <= MOST_NAMED else []


def spread_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot the value of each network at each site, and its accuracy by class. None for one site."""
    networks = {name: result for name, result in at_home(summary).items() if len(result["sites"]) > 1}
    if not networks:
        return None
    metric = metric_of(summary)
    by_class = has_classes(summary)
    figure, (panels,) = new_panels(9.5 if by_class else 5.2, 4.2, 1, 2 if by_class else 1, sharey=metric.share)
    left = panels[0]
    _draw_sites(left, networks, metric)
    for index, (name, result) in enumerate(networks.items()):
        classes = sorted(result["classes"], key=int)
        for axes in panels[1:]:
            axes.plot([int(number) for number in classes], [_share(result["classes"][number]) for number in classes],
                      color=_colour(name, index), linestyle="", marker="o", markersize=6, alpha=0.8)  # fmt: skip
    for axes in panels[1:]:
        _dress(axes, facts_of(ACCURACY))
        axes.set_title("accuracy by class", loc="left", fontsize=10, color=INK)
        axes.set_xlabel("class")
        axes.xaxis.get_major_locator().set_params(integer=True)
        found = sorted({int(name) for result in networks.values() for name in result["classes"]})
        if summary.get("class_names") or len(found) <= MOST_NUMBERS:
            _name_classes(axes, summary, found)
    left.legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.suptitle(f"{metric.caption} on the sites' own test examples", x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def _colour(name: str, index: int) -> str:
    return OWN if name == SITES_OWN else PALETTE[index % len(PALETTE)]


def _draw_sites(axes: Axes, networks: Mapping[str, Any], metric: Facts) -> None:
    """Draw the value of each network at each site: few sites with their names, many in ascending order."""
    few = few_sites(networks.values())
    for index, (name, result) in enumerate(networks.items()):
        colour, label = _colour(name, index), short(name, 40)
        if few:
            spots = [spot(result["sites"].get(site, {})) for site in few]
            axes.plot(range(len(few)), [math.nan if value is None else value for value in spots], color=colour, linestyle="",
                      marker="o", markersize=6, alpha=0.8, label=label)  # fmt: skip
        else:
            values = sorted(value for each in result["sites"].values() if (value := spot(each)) is not None)
            axes.plot([(number + 0.5) / len(values) for number in range(len(values))], values, color=colour, linewidth=2,
                      marker="o" if len(values) <= MOST_ROWS else "", markersize=4, label=label)  # fmt: skip
    _dress(axes, metric)
    title = f"{metric.title} by site" if few else "sites, in ascending order"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    if few:
        axes.set_xticks(range(len(few)), [short(site, 14) for site in few], rotation=30, ha="right")
        axes.set_xlim(-0.5, len(few) - 0.5)
    else:
        axes.set_xlabel("share of sites")
        percent_axis(axes.xaxis)


def classes_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot the number of training examples by site and class as the area of dots. None for one site."""
    counts = summary.get("classes") or {}
    if len(counts) < 2 or not any(counts.values()):
        return None
    shown = sampled(counts)
    classes = sorted({int(name) for site in shown for name in counts[site]})
    most = max(number for site in shown for number in counts[site].values())
    figure, axes = new_figure(max(5.0, min(14.0, 2.4 + 0.34 * len(classes))), max(3.0, 1.7 + 0.22 * len(shown)))
    dots = [(index, int(name), number) for index, site in enumerate(shown) for name, number in counts[site].items()]
    axes.scatter([name for _, name, _ in dots], [index for index, *_ in dots], color=PALETTE[0], alpha=0.75, linewidth=0,
                 s=[max(1.0, MAX_DOT_AREA * number / most) for *_, number in dots])  # fmt: skip
    axes.set_yticks(range(len(shown)), [short(site) for site in shown])
    axes.set_ylim(len(shown) - 0.3, -0.7)
    _name_classes(axes, summary, classes)
    axes.set_xlim(classes[0] - 0.7, classes[-1] + 0.7)
    axes.set_xlabel("class")
    few = f", {len(shown)} of {len(summary['sites'])} sites" if len(shown) < len(summary["sites"]) else ""
    figure.suptitle(f"Training examples by class{few} (largest dot: {most})", x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def sampled(counts: Mapping[str, Any]) -> list[str]:
    """Return the sites to plot, in the order of `counts`: all or, of more than MOST_ROWS, a fixed random sample."""
    names = list(counts)
    if len(names) <= MOST_ROWS:
        return names
    return [names[index] for index in sorted(random.Random(0).sample(range(len(names)), MOST_ROWS))]


def _name_classes(axes: Axes, summary: Mapping[str, Any], classes: list[int]) -> None:
    """Mark each class if there are few, by name if they have names."""
    names = summary.get("class_names") or {}
    if len(classes) > MOST_CLASSES:
        return
    axes.set_xticks(classes)
    if names:
        axes.set_xticks(classes, [short(names.get(str(number), str(number)), MAX_NAME_ON_AXIS) for number in classes],
                        rotation=35, ha="right", rotation_mode="anchor")  # fmt: skip


def _share(both: list[int] | None) -> float | None:
    return both[0] / both[1] if both else None


def _looked_at(summary: Mapping[str, Any]) -> str:
    measured, sites = max((len(result["sites"]) for result in at_home(summary).values()), default=0), len(summary["sites"])
    few = f"{measured} of {sites} sites, a random sample of those that trained and have test examples (evaluation.sites). "
    return few if measured < sites else ""


def _lacking(summary: Mapping[str, Any]) -> str:
    """Return a sentence if the first metric is not defined at some sites."""
    sites = [spot(each) for each in next(iter(at_home(summary).values()))["sites"].values()]
    defined = sum(value is not None for value in sites)
    return (
        f"Mean over {defined} of {len(sites)} sites (others' examples do not define it, such as one class only). "
        if defined < len(sites)
        else ""
    )


def _coarse(summary: Mapping[str, Any]) -> str:
    """Return a warning if sites have so few test examples that their single accuracies mean little."""
    images = {name: site["images"] for result in at_home(summary).values() for name, site in result["sites"].items()}
    few = sum(number < FEW_IMAGES for number in images.values())
    return f"{few} of {len(images)} sites have fewer than {FEW_IMAGES} test examples: use only the mean. " if few else ""


def _dress(axes: Axes, metric: Facts) -> None:
    plain(axes)
    if metric.share:
        axes.set_ylim(-0.03, 1.03)
    value_axis(axes.yaxis, metric)
    within_bounds(axes.yaxis, metric)
