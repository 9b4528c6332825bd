"""Measure every head of a run on every extractor, and save one pair as a network."""

from collections.abc import Mapping
from pathlib import Path

from fedloom.clients.data import class_meanings, label
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import Architecture, Model, architecture_of, save_network
from fedloom.clients.objectives import resolve
from fedloom.clients.objectives.components.sharing import EXTRACTOR, HEAD
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import RECOMPUTED, has_data
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import View
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.strategies.components.classes import SiteClasses
from fedloom.server.strategies.components.recombination import Recombining
from fedloom.sims.operations.compose import name_of, steadily
from fedloom.sims.operations.network_files import check_out
from fedloom.sims.report.canvas import save
from fedloom.sims.report.forgetting import forgotten_sites
from fedloom.sims.report.heads import exchanges, heads_figure, heads_table, matrix_table
from fedloom.sims.report.results import homes
from fedloom.sims.report.tables import Cell, Table, percent

STATISTICS = {
    "batch": "measured with the statistics of each batch; the file has those of the site's own network",
    "running": "measured with the stored ones, which belong to other features than the head receives",
    RECOMPUTED: "measured with recomputed statistics, which are in the file",
}


def measured(run: Path, png: Path | None = None) -> list[Table]:
    """Return tables: for each method, every head's accuracy on every extractor; then a comparison. `png`: draw heat maps.

    Raises UserError if the run measured no heads.
    """
    if png:
        check_out(png, option="--png")
        if png.suffix.lower() != ".png":
            raise UserError(f"--png: got {png}, takes the name of a file that ends in .png")
    read_config(run)
    summary = RunFolder(run).summary()
    summary = {**summary, "unlearned": [matrix.site for matrix in forgotten_sites(run, summary)]}
    try:
        matrices, domains = exchanges(summary), homes(summary)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{run}: the run's results are damaged ({error!r}); run the experiment again") from None
    if not matrices:
        raise UserError(
            f"{run}: this run measured no heads on other sites' extractors; name a finished run of head_transfer"
        )
    if png and (figure := heads_figure(matrices, domains)):
        save(figure, png)
    return [*(matrix_table(matrix, domains) for matrix in matrices), heads_table(matrices)]


def transfer(run: Path, giver: str, taker: str, out: Path) -> Table:
    """Write the network of `taker`'s extractor and `giver`'s head, and return a table of its parts and its accuracy.

    Raises UserError for a run of another method, for sites that are unknown, forgotten or did not publish, and if `out`
    exists.
    """
    check_out(out)
    if out.exists():
        raise UserError(f"--out: {out} exists already; use another file")
    config = read_config(run)
    sites = {site.name: site for site in config.roster}
    for option, name in (("--from", giver), ("--to", taker)):
        if name not in sites:
            raise unknown(option, name, sites)
    evaluator, (model, rows) = steadily(run, config, lambda state: _pair(state, sites[giver], sites[taker]))
    if has_data(config):
        model = evaluator.with_statistics(model)
    save_network(out, evaluator.loaded(model), name_of(model.architecture), SplitRule.of(config))
    if any(name.endswith("running_mean") for name in model.state):
        rows.append(["BatchNorm's statistics", STATISTICS[config.evaluation.statistics]])
    return Table("Recombined", ["what", ""], rows)


def recombined(extractor: State, head: State, architecture: Architecture, misfit: str) -> State:
    """Return the state of a network made of an extractor and a head.

    Args:
        extractor: The extractor's tensors.
        head: The head's tensors.
        architecture: The architecture of the network.
        misfit: The start of the error's message.

    Raises:
        UserError: A tensor's shape does not fit the architecture.
    """
    state = {**extractor, **head}
    wanted = architecture.build().state_dict()
    for name in {**wanted, **state}:
        actual, expected = (_shape(tensors, name) for tensors in (state, wanted))
        if actual != expected:
            raise UserError(f"{misfit}: '{name}' is {actual}, the network takes {expected}")
    return {name: state[name] for name in wanted}


def _pair(aggregation: ServerState, giver: Site, taker: Site) -> tuple[Model, list[list[Cell]]]:
    """Return the network, and rows of a table about it."""
    view, config, strategy = aggregation.view(), aggregation.config, aggregation.strategy
    if not isinstance(strategy, Recombining):
        name = config.strategy["name"]
        raise UserError(f"strategy '{name}' stores no components of sites; use a run of head_transfer")
    head = _published(strategy, view, giver, HEAD)
    extractor = _published(strategy, view, taker, EXTRACTOR)
    architecture = architecture_of(config, taker).with_outputs(architecture_of(config, giver).outputs)
    misfit = f"{giver.name}'s head does not fit {taker.name}'s extractor"
    model = Model(architecture, recombined(extractor, head, architecture, misfit), (label(taker.spec),))
    rows: list[list[Cell]] = [
        ["extractor", f"{taker.name} ({label(taker.spec)})"],
        ["head", f"{giver.name} ({label(giver.spec)})"],
        ["its classes", _classes(config, giver)],
    ]
    return model, [*rows, *_scores(strategy, view, giver.name, taker.name)]


def _published(strategy: Recombining, view: View, site: Site, prefix: str) -> State:
    part = strategy.component(view, site.name, prefix)
    if not part:
        raise UserError(f"site '{site.name}' did not publish its {prefix[:-1]} (objective.publish says what sites publish)")
    return part


def _classes(config: Config, site: Site) -> str:
    """Return the names of the classes of a head; numbers where classes have no names."""
    meanings = {site.name: class_meanings(site.spec) if has_data(config) else ()}
    names = SiteClasses.from_reports(resolve(config), [site], meanings, ()).names[site.name]
    return ", ".join(name for name in names if name is not None)


def _scores(strategy: Recombining, view: View, giver: str, taker: str) -> list[list[Cell]]:
    """Return the accuracy of the pair, and of the extractor with its own head."""
    at = f"on {taker}'s test examples of the head's classes"
    for matrix in exchanges(strategy.summary_entries(view)):
        if (pair := matrix.of(taker, giver)) is not None:
            rows: list[list[Cell]] = [["accuracy", f"{percent(pair)} {at}"]]
            if taker != giver:
                rows.append(["with its own head", f"{percent(matrix.of(taker, taker))} {at}"])
            return rows
    return [["accuracy", f"not measured in this run: {taker} sent no result for {giver}'s head"]]


def _shape(state: Mapping[str, object], name: str) -> str:
    shape = getattr(state.get(name), "shape", None)
    return "missing" if shape is None else " x ".join(map(str, shape)) or "one number"
