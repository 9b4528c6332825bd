"""`fedloom cluster`: files that start Ray over several machines for a run."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.conf.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Files that start a run over several machines: Slurm, Kubernetes, SSH.")

Experiment = Annotated[str, typer.Argument(help="A shipped experiment, or the path of a YAML file.")]
Words = Annotated[list[str] | None, typer.Argument(help="key=value, as for fedloom run.")]
Count = Annotated[int, typer.Option("--nodes", help="Machines, the run's server on the first.")]
Cores = Annotated[int, typer.Option("--cpus", help="Cores of each.")]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of each; a worker then has one, unless engine.num_gpus says less.")]
Time = Annotated[str, typer.Option("--time", help="Ended after [DAYS-]HOURS:MINUTES:SECONDS.")]
Image = Annotated[str, typer.Option("--image", help="A container image with fedloom in it.")]
Environment = Annotated[str, typer.Option("--environment", help="A Python environment's folder, on all nodes.")]
Port = Annotated[int, typer.Option("--port", help="Of the first node's Ray.")]
Write = Annotated[Path | None, typer.Option("--write", help="Into this file, which must not be there yet.")]


@app.command()
def slurm(
    experiment: Experiment = "digits", words: Words = None, nodes: Count = 2, cpus: Cores = 8, gpus: Gpus = 0,
    time: Time = "24:00:00", image: Image = "", environment: Environment = "", port: Port = 6379,
    partition: Annotated[str, typer.Option(help="Slurm's.")] = "",
    account: Annotated[str, typer.Option(help="Slurm's.")] = "",
    write: Write = None,
) -> None:  # fmt: skip
    """A batch file for sbatch."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.slurm import batch_file

    shape = {"nodes": nodes, "cpus": cpus, "gpus": gpus, "time": time, "image": image, "environment": environment}
    text = batch_file(job(experiment, words or [], {**shape, "port": port}), {"partition": partition, "account": account})
    _give(text, write, [f"sbatch {write}"])


@app.command()
def kubernetes(
    experiment: Experiment = "digits", words: Words = None, nodes: Count = 2, cpus: Cores = 8, gpus: Gpus = 0,
    time: Time = "24:00:00", image: Image = "", environment: Environment = "",
    claim: Annotated[str, typer.Option(help="A persistent volume claim, for runs and data.")] = "",
    memory: Annotated[str, typer.Option(help="Of each node.")] = "16Gi",
    namespace: Annotated[str, typer.Option(help="Kubernetes' own.")] = "default",
    write: Write = None,
) -> None:  # fmt: skip
    """A RayJob for kubectl apply, where the KubeRay operator runs."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.kubernetes import ray_job

    shape = {"nodes": nodes, "cpus": cpus, "gpus": gpus, "time": time, "image": image, "environment": environment}
    text = ray_job(job(experiment, words or [], shape), {"claim": claim, "memory": memory, "namespace": namespace})
    _give(text, write, [f"kubectl apply -f {write}"])


@app.command()
def ssh(
    experiment: Experiment = "digits", words: Words = None, cpus: Cores = 8, gpus: Gpus = 0,
    image: Image = "", environment: Environment = "", port: Port = 6379,
    hosts: Annotated[str, typer.Option(help="Machines, with ',' between; the run's server on the first.")] = "",
    user: Annotated[str, typer.Option(help="Whom to log in as.")] = "",
    key: Annotated[str, typer.Option(help="A private key to log in with.")] = "",
    write: Write = None,
) -> None:  # fmt: skip
    """A YAML file for ray up."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.ssh import cluster_file, commands

    names = [host for host in hosts.split(",") if host]
    shape = {"nodes": max(1, len(names)), "cpus": cpus, "gpus": gpus, "image": image, "environment": environment}
    cluster_job, path = job(experiment, words or [], {**shape, "port": port}), str(write or "")
    _give(cluster_file(cluster_job, {"hosts": names, "user": user, "key": key}, path), write, commands(cluster_job, path))


def _give(text: str, file: Path | None, then: list[str]) -> None:
    """Print the text, or write it and say what to type next."""
    if file is None:
        typer.echo(text, nl=False)
        return
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"--write: {file} is there already; name another file") from None
    except FileNotFoundError:
        raise UserError(f"--write: {file.parent} is no folder; make it, or name another") from None
    typer.echo(f"written: {file}; start the run with")
    for line in then:
        typer.echo(f"  {line}")
