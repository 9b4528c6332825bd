"""`fedloom federation`: run the machines of a real federation, on one machine or several."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.sims.cli.options import Json, confirmed
from fedloom.sims.progress.waiting import waiting
from fedloom.sims.report.tables import Table

app = typer.Typer(no_args_is_help=True, help="Run a real federation: a server, and a node at each site.")

Folder = Annotated[Path, typer.Argument(help="Folder of the federation, with a folder for each machine.")]
HERE = Path("federation")


@app.command()
def up(
    folder: Folder = HERE,
    nodes: Annotated[int, typer.Option(help="Number of sites, for a new folder.", min=1, max=100)] = 3,
    tls: Annotated[
        bool, typer.Option("--tls/--no-tls", help="Encryption, and a key for each site. It is always on.")
    ] = True,
) -> None:
    """Start a federation on this machine, and wait until all nodes have joined. Repeat it to restart stopped machines."""
    from fedloom.sims.federation.local import outdated
    from fedloom.sims.federation.local import up as start

    with waiting("starting the server and the nodes"):
        names = start(folder, nodes, tls)
    for line in outdated(folder):
        typer.echo(line)
    joined = "1 node has" if len(names) == 1 else f"{len(names)} nodes have"
    typer.echo(f"{joined} joined: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. Start a run with:")
    shipped = {"site-0000", "site-0001"} <= {*names}  # the sites of digits
    experiment = "digits" if shipped else "EXPERIMENT.yaml"
    typer.echo(f"  fedloom run {experiment} engine.name=flower engine.address={folder}")
    if not shipped:
        typer.echo("The sites in EXPERIMENT.yaml must have these names.")


@app.command()
def down(folder: Folder = HERE) -> None:
    """Stop the server and the nodes that this folder started."""
    from fedloom.sims.federation.local import down as stop

    with waiting("stopping the server and the nodes"):
        stopped = stop(folder)
    typer.echo(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def status(folder: Folder = HERE, as_json: Json = False) -> None:
    """Show which machines are running, and which nodes are online at the server. Exit code 1 unless all are."""
    from rich.console import Console

    from fedloom.sims.federation.local import ailing
    from fedloom.sims.federation.local import status as examine

    with waiting("asking the server", as_json):
        rows = examine(folder)
    down, columns = ailing(rows), ["machine", "here", "at the server"]
    if as_json:
        machines = [dict(zip(columns, row, strict=True)) | {"ok": row[0] not in down} for row in rows]
        typer.echo(json.dumps({"ok": not down, "machines": machines}))
    else:
        Console().print(Table(f"{folder}", columns, rows).rich())
    raise typer.Exit(1 if down else 0)


@app.command()
def logs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [MACHINE]...", help="Folder of the federation, and machines such as site-0001. Default: all."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of the federation, if it is not the first argument.")] = None,
    lines: Annotated[int, typer.Option(help="Number of last lines of each machine.", min=1)] = 10,
) -> None:
    """Show the last lines of the machines' logs."""
    from fedloom.sims.federation.local import logs as read
    from fedloom.sims.federation.plan import holds_machines

    names = list(words or [])
    if folder is None:
        folder = Path(names.pop(0)) if names and holds_machines(Path(names[0])) else HERE
    for name, text in read(folder, names, lines):
        typer.echo(f"== {name}\n{text}")


@app.command()
def plan(
    nodes: Annotated[Path, typer.Argument(help="YAML file with the keys host, port and sites: [{name: ...}, ...].")],
    folder: Annotated[Path, typer.Option(help="Folder to write the machines' folders to.")] = HERE,
) -> None:
    """Write a folder with keys and settings for each machine of one owner. Repeat it to add new sites.

    Sites of other owners make their own keys with 'fedloom federation join'.
    """
    from fedloom.sims.federation.joining import read_members
    from fedloom.sims.federation.machines import let_in
    from fedloom.sims.federation.plan import MEMBERS, SERVER, Plan, unlike_plan, write_plan
    from fedloom.sims.federation.sheets import read

    planned = read(Plan, nodes)
    homes = write_plan(planned, folder)
    for home in homes:
        command = "server ." if home.name == SERVER else "node site.yaml"
        typer.echo(f"{home}: copy it to its machine, and run in it: fedloom federation {command}")
    if homes[0].name != SERVER:
        typer.echo(let_in(folder / SERVER))
        for line in unlike_plan(planned, folder):
            typer.echo(line)
    authority = read_members(folder / SERVER / MEMBERS).authority
    typer.echo(f"Fingerprint of the server's authority, to compare with 'accept' at sites of other owners:\n{authority}")
    if any(home.name != SERVER for home in homes):
        typer.echo(
            "This folder has the private keys of these sites: anyone who can read it can act as any of them. Sites of other"
        )
        typer.echo("owners make their own keys with 'fedloom federation join'.")


@app.command()
def join(
    name: Annotated[str, typer.Argument(help="The site's name, as in the configurations of runs.")],
    superlink: Annotated[str, typer.Option(help="The server's address, HOST:PORT.")] = "",
    folder: Annotated[Path | None, typer.Option(help="The site's folder. Default: a folder with its name.")] = None,
    rekey: Annotated[bool, typer.Option("--rekey", help="Replace a lost key.")] = False,
) -> None:
    """At a site: make its key, which stays here, and a request to join for the operator."""
    from fedloom.sims.federation.joining import REQUEST, ask

    home = folder or Path(name)
    fingerprint = ask(home, name, superlink, rekey)
    typer.echo(f"{home / REQUEST}: send it to the operator. Read out this fingerprint by another channel, such as by phone:")
    typer.echo(f"  {name} {fingerprint}")
    typer.echo(f"When the operator sends the members' file, run: fedloom federation accept FILE --folder {home}")


@app.command()
def admit(
    request: Annotated[Path, typer.Argument(help="A site's request, from 'fedloom federation join'.")],
    folder: Annotated[Path, typer.Option(help="Folder of the federation, or of the server.")] = HERE,
    fingerprint: Annotated[
        str, typer.Option(help="The fingerprint that the site reads out, compared without a question.")
    ] = "",
    rekey: Annotated[bool, typer.Option("--rekey", help="Replace the lost key of a known site.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """At the server: admit a site that made its own key, after you have compared its fingerprint."""
    from fedloom.conf.errors import UserError
    from fedloom.sims.federation import joining
    from fedloom.sims.federation.machines import let_in
    from fedloom.sims.federation.plan import MEMBERS

    asked = joining.read_request(request)
    joining.check_admission(folder, asked, rekey)
    typer.echo(f"{asked.name} {asked.fingerprint}")
    if fingerprint and fingerprint.strip() != asked.fingerprint:
        raise UserError(f"{request}: its key does not have this fingerprint; no site is admitted")
    _agree(
        "Does the site read out the same fingerprint?",
        fingerprint or yes,
        "admit",
        "use --fingerprint to compare, or --yes to skip the question",
    )
    server = joining.admit(folder, asked)
    typer.echo(let_in(server))
    typer.echo(f"{server / MEMBERS}: send it to all sites, which run: fedloom federation accept {MEMBERS}")
    typer.echo(
        f"Fingerprint of the server's authority, to read out to them:\n{joining.read_members(server / MEMBERS).authority}"
    )


@app.command()
def accept(
    members: Annotated[Path, typer.Argument(help="The members' file, from the operator.")],
    folder: Annotated[Path, typer.Option(help="The site's folder.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """At a site: accept the other members and the server's certificate, after you have compared the fingerprints."""
    from rich.console import Console

    from fedloom.sims.federation import joining

    accepted = joining.read_members(members)
    rows = joining.changes(folder, accepted)
    Console().print(Table(f"{members}", ["who", "change", "fingerprint"], rows).rich())
    _agree("Do the operator and the sites read out the same fingerprints?", yes, "accept", "use --yes to skip the question")
    joining.accept(folder, accepted)
    typer.echo(f"{folder}: has accepted the members. Start its node with: fedloom federation node {folder / 'site.yaml'}")


def _agree(question: str, agreed: object, command: str, otherwise: str) -> None:
    from fedloom.conf.errors import UserError

    if not confirmed(question, agreed, command, otherwise):
        raise UserError(f"{command}: not confirmed; nothing is changed")


@app.command()
def rekey(
    site: Annotated[str, typer.Argument(help="The site that lost its key.")],
    folder: Annotated[Path, typer.Option(help="Folder of the federation.")] = HERE,
) -> None:
    """Replace a site's lost key with a new one. The old key is no longer admitted."""
    from fedloom.sims.federation.machines import rekey as renew

    node = renew(folder, site)
    typer.echo(
        f"{folder / site}: has a new key. Copy the folder to the site's machine, and start its node again. In each run"
    )
    typer.echo(f"with this site, confirm the new node: fedloom readmit RUN {site} --node {node}")


@app.command()
def server(folder: Annotated[Path, typer.Argument(help="The server's folder.")]) -> None:
    """Run the server in its folder until Ctrl-C, and restart it if it fails."""
    from fedloom.sims.federation.machines import run_server

    run_server(folder)


@app.command()
def node(sheet: Annotated[Path, typer.Argument(help="The site's site.yaml.")]) -> None:
    """Run the node of a site until Ctrl-C, and restart it if it fails."""
    from fedloom.sims.federation.machines import run_node

    run_node(sheet)
