"""`fedloom federation`: machines that Flower connects, here or elsewhere."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.sims.progress.waiting import waiting
from fedloom.sims.report.tables import Table

app = typer.Typer(no_args_is_help=True, help="A real federation: a server and a node at each site.")

Folder = Annotated[Path, typer.Argument(help="Where the machines' folders are.")]
HERE = Path("federation")


@app.command()
def up(
    folder: Folder = HERE,
    nodes: Annotated[int, typer.Option(help="So many sites, where there is no such folder yet.", min=1, max=100)] = 3,
    tls: Annotated[
        bool, typer.Option("--tls/--no-tls", help="Encrypted; the sites are known by their keys. Always so.")
    ] = True,
) -> None:
    """Start a federation on this machine and wait until all nodes are in; again: start what is down."""
    from fedloom.sims.federation.local import up as start

    with waiting("starting server and nodes, and waiting until they are in"):
        names = start(folder, nodes, tls)
    there = "1 node is" if len(names) == 1 else f"{len(names)} nodes are"
    typer.echo(f"{there} in: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; a run:")
    typer.echo(f"  fedloom run digits engine.name=flower engine.address={folder}")


@app.command()
def down(folder: Folder = HERE) -> None:
    """Stop what `up` started, and nothing else."""
    from fedloom.sims.federation.local import down as stop

    with waiting("stopping server and nodes"):
        stopped = stop(folder)
    typer.echo(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def status(folder: Folder = HERE) -> None:
    """Which machines of the folder are up, and which nodes the server sees. Exits with 1 unless all are up and online."""
    from rich.console import Console

    from fedloom.sims.federation.local import ailing
    from fedloom.sims.federation.local import status as examine

    with waiting("asking the server"):
        rows = examine(folder)
    Console().print(Table(f"{folder}", ["machine", "here", "at the server"], rows).rich())
    if ailing(rows):
        raise typer.Exit(1)


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
    from fedloom.sims.federation.local import logs as read
    from fedloom.sims.federation.plan import holds_machines

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
    """Write a folder with keys, sheet and start command for each machine of one owner; again: for sites that are new.

    Sites of other owners make keys of their own: 'fedloom federation join'.
    """
    from fedloom.sims.federation.joining import read_members
    from fedloom.sims.federation.machines import let_in
    from fedloom.sims.federation.plan import MEMBERS, SERVER, Plan, write_plan
    from fedloom.sims.federation.sheets import read

    homes = write_plan(read(Plan, nodes), folder)
    for home in homes:
        command = "server ." if home.name == SERVER else "node site.yaml"
        typer.echo(f"{home}: copy it to its machine; there, in it: fedloom federation {command}")
    if homes[0].name != SERVER:
        typer.echo(let_in(folder / SERVER))
    authority = read_members(folder / SERVER / MEMBERS).authority
    typer.echo(f"the server's authority, which 'accept' shows at sites of other owners:\n{authority}")
    if any(home.name != SERVER for home in homes):
        typer.echo(
            "These sites' keys were made here: whoever has this folder can speak as any of them. Sites of other owners"
        )
        typer.echo("make their own: fedloom federation join")


@app.command()
def join(
    name: Annotated[str, typer.Argument(help="The site's name, as in the configurations of runs.")],
    superlink: Annotated[str, typer.Option(help="The server's address, HOST:PORT, from the operator.")] = "",
    folder: Annotated[Path | None, typer.Option(help="The site's folder; else one of its name.")] = None,
    rekey: Annotated[bool, typer.Option("--rekey", help="The key is lost: make another.")] = False,
) -> None:
    """At a site: make its key, which stays here, and a request for the operator to let it in."""
    from fedloom.sims.federation.joining import REQUEST, ask

    home = folder or Path(name)
    fingerprint = ask(home, name, superlink, rekey)
    typer.echo(f"{home / REQUEST}: send it to the operator, and read this out when asked, by another way than it goes:")
    typer.echo(f"  {name} {fingerprint}")
    typer.echo(f"The members' file comes back: fedloom federation accept FILE --folder {home}")


@app.command()
def admit(
    request: Annotated[Path, typer.Argument(help="A site's request, from 'fedloom federation join'.")],
    folder: Annotated[Path, typer.Option(help="Where the server's folder is, or that folder.")] = HERE,
    fingerprint: Annotated[str, typer.Option(help="As the site reads it out: it is compared, and nobody is asked.")] = "",
    rekey: Annotated[bool, typer.Option("--rekey", help="A known site has lost its key: take that one back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """At the server: let a site in that made its own key, after its fingerprint was compared."""
    from fedloom.conf.errors import UserError
    from fedloom.sims.federation import joining
    from fedloom.sims.federation.machines import let_in
    from fedloom.sims.federation.plan import MEMBERS

    asked = joining.read_request(request)
    joining.check_admission(folder, asked, rekey)
    typer.echo(f"{asked.name} {asked.fingerprint}")
    if fingerprint and fingerprint.strip() != asked.fingerprint:
        raise UserError(f"{request}: the key in it is not the one that was read out; nobody is let in")
    _agree("Does the site read out the same?", fingerprint or yes, "admit", "--fingerprint compares, --yes does not ask")
    server = joining.admit(folder, asked)
    typer.echo(let_in(server))
    typer.echo(f"{server / MEMBERS}: send it to all sites; there: fedloom federation accept {MEMBERS}")
    typer.echo(f"the server's authority, to read out to them:\n{joining.read_members(server / MEMBERS).authority}")


@app.command()
def accept(
    members: Annotated[Path, typer.Argument(help="The members' file, from the operator.")],
    folder: Annotated[Path, typer.Option(help="The site's folder.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """At a site: take over who else is a member, and the server's certificate, after fingerprints were compared."""
    from rich.console import Console

    from fedloom.sims.federation import joining

    others = joining.read_members(members)
    rows = joining.changes(folder, others)
    Console().print(Table(f"{members}", ["who", "change", "fingerprint"], rows).rich())
    _agree("Do operator and sites read out the same?", yes, "accept", "--yes does not ask")
    joining.accept(folder, others)
    typer.echo(f"{folder}: knows them from now on; its node: fedloom federation node {folder / 'site.yaml'}")


def _agree(question: str, agreed: object, command: str, otherwise: str) -> None:
    """UserError unless it is agreed already, or somebody at the terminal says yes."""
    import click

    from fedloom.conf.errors import UserError

    if agreed:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{command}: stdin is not a terminal, so nobody can be asked; nothing is changed ({otherwise})")
    try:
        agreed = typer.confirm(question)
    except click.Abort:
        agreed = False
    if not agreed:
        raise UserError(f"{command}: nobody agreed; nothing is changed")


@app.command()
def rekey(
    site: Annotated[str, typer.Argument(help="The site whose key is lost.")],
    folder: Annotated[Path, typer.Option(help="Where the machines' folders are.")] = HERE,
) -> None:
    """Let nobody in with a site's old key any more, and make it a new one."""
    from fedloom.sims.federation.machines import rekey as renew

    node = renew(folder, site)
    typer.echo(
        f"{folder / site}: has a new key; copy it to the site's machine and start its node again. In runs that it takes"
    )
    typer.echo(f"part in, it is let in when you say so: fedloom readmit RUN {site} --node {node}")


@app.command()
def server(folder: Annotated[Path, typer.Argument(help="The server's folder.")]) -> None:
    """Keep the SuperLink of a server's folder running."""
    from fedloom.sims.federation.machines import run_server

    run_server(folder)


@app.command()
def node(sheet: Annotated[Path, typer.Argument(help="The site's site.yaml.")]) -> None:
    """Keep the node of a site running."""
    from fedloom.sims.federation.machines import run_node

    run_node(sheet)
