"""`fedloom federation`: machines that Flower connects, here or elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from sims.cli.waiting import waiting
from sims.report.tables import Table

app = typer.Typer(no_args_is_help=True, help="A real federation: a server and a node at each site.")

Folder = Annotated[Path, typer.Argument(help="Where the machines' folders are.")]
HERE = Path("federation")


@app.command()
def up(
    folder: Folder = HERE,
    nodes: Annotated[int, typer.Option(help="So many sites, where there is no such folder yet.", min=1, max=100)] = 3,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypted; the sites are known by their keys.")] = False,
) -> None:
    """Start a federation on this machine and wait until all nodes are in; again: start what is down."""
    from sims.federation.local import up as start

    with waiting("starting server and nodes, and waiting until they are in"):
        names = start(folder, nodes, tls)
    there = "1 node is" if len(names) == 1 else f"{len(names)} nodes are"
    typer.echo(f"{there} in: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; a run:")
    typer.echo(f"  fedloom run digits engine.name=flower engine.address={folder}")


@app.command()
def down(folder: Folder = HERE) -> None:
    """Stop what `up` started, and nothing else."""
    from sims.federation.local import down as stop

    with waiting("stopping server and nodes"):
        stopped = stop(folder)
    typer.echo(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def status(folder: Folder = HERE) -> None:
    """Which machines of the folder are up, and which nodes the server sees."""
    from rich.console import Console

    from sims.federation.local import status as examine

    with waiting("asking the server"):
        rows = examine(folder)
    Console().print(Table(f"{folder}", ["machine", "here", "at the server"], rows).rich())


@app.command()
def logs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [MACHINE]...", help="The machines' folder; machines, such as site-0001; none: all."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="The same folder, named after the machines.")] = None,
    lines: Annotated[int, typer.Option(help="So many last lines of each.", min=1)] = 10,
) -> None:
    """What the machines said last."""
    from sims.federation.local import logs as read
    from sims.federation.plan import holds_machines

    names = list(words or [])
    if folder is None:
        folder = Path(names.pop(0)) if names and holds_machines(Path(names[0])) else HERE
    for name, text in read(folder, names, lines):
        typer.echo(f"== {name}\n{text}")


@app.command()
def plan(
    nodes: Annotated[Path, typer.Argument(help="A YAML file: host, port, sites: [{name: ...}, ...].")],
    folder: Annotated[Path, typer.Option(help="Where the machines' folders go.")] = HERE,
) -> None:
    """Write a folder with keys, sheet and start command for each machine; in a federation's folder, for its new sites."""
    from sims.federation.machines import let_in
    from sims.federation.plan import SERVER, Plan, write_plan
    from sims.federation.sheets import read

    homes = write_plan(read(Plan, nodes), folder)
    for home in homes:
        command = "server ." if home.name == SERVER else "node site.yaml"
        typer.echo(f"{home}: copy it to its machine; there, in it: fedloom federation {command}")
    if homes[0].name != SERVER:
        typer.echo(let_in(folder / SERVER))


@app.command()
def rekey(
    site: Annotated[str, typer.Argument(help="The site whose key is lost.")],
    folder: Annotated[Path, typer.Option(help="Where the machines' folders are.")] = HERE,
) -> None:
    """Let nobody in with a site's old key any more, and make it a new one."""
    from sims.federation.machines import rekey as renew

    node = renew(folder, site)
    typer.echo(
        f"{folder / site}: has a new key; copy it to the site's machine and start its node again. In runs that it takes"
    )
    typer.echo(f"part in, it is let in when you say so: fedloom readmit RUN {site} --node {node}")


@app.command()
def server(folder: Annotated[Path, typer.Argument(help="The server's folder.")]) -> None:
    """Keep the SuperLink of a server's folder running."""
    from sims.federation.machines import run_server

    run_server(folder)


@app.command()
def node(sheet: Annotated[Path, typer.Argument(help="The site's site.yaml.")]) -> None:
    """Keep the node of a site running."""
    from sims.federation.machines import run_node

    run_node(sheet)
