"""The commands on networks: `networks`, `align` and `fuse` for files of them, `heads` and `transfer-head` for a run's."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.conf.errors import UserError
from fedloom.sims.cli.options import numbers
from fedloom.sims.progress.waiting import LIBRARIES, steps_shown, waiting

app = typer.Typer()
RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/components.")]
SELECTION, SEARCH = "selection", "search"

Probe = Annotated[str, typer.Option(help="The domain whose training images the layers are compared on.")]
Samples = Annotated[int, typer.Option(help="How many of them.", min=2)]
Size = Annotated[int, typer.Option(help="Images' size, for networks that are named here.", min=4)]
Grey = Annotated[bool, typer.Option("--grey", help="One channel, for networks that are named here.")]
Data = Annotated[str, typer.Option("--data", help="The folder with the data (data.root).")]


@app.command()
def networks(
    name: Annotated[str, typer.Argument(help="vgg13:norm=batch, torchvision:resnet18, mine:Net:width=8; none: all.")] = "",
    channels: Annotated[int, typer.Option(help="Of the images.", min=1)] = 3,
    size: Annotated[int, typer.Option(help="Of the images, in pixels.", min=4)] = 32,
    classes: Annotated[int, typer.Option(help="The network's outputs.", min=1)] = 10,
) -> None:
    """The points at which a network can be cut into extractor and head, with the features there."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.cut_points import names, points

    typer.echo(points(name, channels, size, classes).plain() if name else "\n".join(names()))


@app.command()
def align(
    a: Annotated[Path, typer.Argument(help="A network's .safetensors file.")],
    b: Annotated[Path, typer.Argument(help="Another's.")],
    network_a: Annotated[str, typer.Option(help="Its name, where the file does not say it: vgg13:norm=batch.")] = "",
    network_b: Annotated[str, typer.Option(help="The other's, such as torchvision:resnet18.")] = "",
    probe: Probe = "cifar10",
    samples: Samples = 200,
    comparison: Annotated[str, typer.Option(help="cka, wasserstein (pre-activations) or neurons.")] = "cka",
    free_first: Annotated[bool, typer.Option("--free-first", help="First layers need not correspond.")] = False,
    free_last: Annotated[bool, typer.Option("--free-last", help="Nor last ones.")] = False,
    size: Size = 32,
    grey: Grey = False,
    root: Data = "",
    out: Annotated[Path, typer.Option(help="The picture of the costs and the map.")] = Path("alignment.png"),
) -> None:
    """Which layer of one network corresponds to which of another."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.align_files import align as compare
        from fedloom.sims.operations.network_files import NetworkFiles

    files = NetworkFiles([a, b], [network_a, network_b], probe, samples, size, grey, root)
    with steps_shown():
        table = compare(files, comparison, not free_first, not free_last, out)
    typer.echo(table.plain())
    typer.echo(f"written: {out}")


@app.command()
def fuse(
    networks: Annotated[list[Path], typer.Argument(help="Two or more networks' .safetensors files.")],
    into: Annotated[str, typer.Option(help="The file (or its number: 1, 2, ...) whose widths the result has.")],
    depth: Annotated[str, typer.Option(help="The file (or its number) whose layers it has; default: --into.")] = "",
    network: Annotated[
        list[str] | None, typer.Option(help="What is in each file, in order, 'vgg13:norm=batch'; '' for one that says it.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(help="Names of each network's outputs, cat,dog, in the files' order, where they differ."),
    ] = None,
    weights: Annotated[str, typer.Option(help="Of the networks in the average: 0.3,0.7, or search. Default: equal.")] = "",
    probe: Probe = "cifar10",
    samples: Samples = 200,
    labels: Annotated[str, typer.Option(help="Measure accuracies on this domain's test images.")] = "",
    refit: Annotated[str, typer.Option(help="What layers are fitted to: selection, regression, plans or none.")] = SELECTION,
    width: Annotated[float, typer.Option(help="Of the result, in widths of --into: 1, 1.25, 1.5.")] = 1.0,
    reference: Annotated[bool, typer.Option("--reference", help="As the public code of CLAFusion does.")] = False,
    size: Size = 32,
    grey: Grey = False,
    root: Data = "",
    out: Annotated[Path, typer.Option(help="Where the fused network goes.")] = Path("fused.safetensors"),
    report: Annotated[bool, typer.Option("--report", help="Write the tables beside it, too, as Markdown.")] = False,
) -> None:
    """Fuse networks of equal or different depth and width into one."""
    with waiting(LIBRARIES):
        from fedloom.fusion.settings import FusionSettings
        from fedloom.sims.operations import fuse_files as fusing
        from fedloom.sims.operations.network_files import NetworkFiles

    files = NetworkFiles(networks, network or [], probe, samples, size, grey, root, classes or [])
    if reference and (refit != SELECTION or width != 1.0):
        raise UserError("--reference: the public code knows no --refit and no --width; leave these out")
    settings = FusionSettings.reference() if reference else FusionSettings(refit=refit, width=width)
    written = fusing.check_report(out) if report else None
    search = weights == SEARCH
    shares = None if search else numbers(weights, "--weights")
    with steps_shown():
        tables = fusing.fuse_files(files, fusing.FusionOrder(into, depth, out, shares, search, labels), settings)
    typer.echo("\n".join(table.plain() for table in tables))
    typer.echo(f"written: {out}")
    if written:
        written.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
        typer.echo(f"written: {written}")


@app.command()
def heads(
    run: RunPath,
    png: Annotated[Path | None, typer.Option(help="Draw the heat maps, too, into this file.")] = None,
) -> None:
    """How good every site's head is on every site's extractor, for the run's method and its baselines."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.transfer_head import measured

    tables = measured(run, png)
    typer.echo("\n".join(table.plain() for table in tables))
    if png:
        typer.echo(f"written: {png}")


@app.command("transfer-head")
def transfer_head(
    run: RunPath,
    giver: Annotated[str, typer.Option("--from", help="The site whose head it is.")],
    taker: Annotated[str, typer.Option("--to", help="The site whose extractor it is put on.")],
    out: Annotated[Path, typer.Option(help="Where the network goes.")] = Path("net.safetensors"),
) -> None:
    """One site's head on another site's extractor, as a network, and how good it was measured to be."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.transfer_head import transfer

    typer.echo(transfer(run, giver, taker, out).plain())
    typer.echo(f"written: {out}")
