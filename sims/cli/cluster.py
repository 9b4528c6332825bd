"""`fedloom cluster`: write files that start Ray on several machines for a run."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.conf.errors import UserError

app = typer.Typer(
    no_args_is_help=True, help="Write files that start a run on several machines, by Slurm, Kubernetes or SSH."
)

Experiment = Annotated[str, typer.Argument(help="A shipped experiment, or a YAML file.")]
Words = Annotated[list[str] | None, typer.Argument(help="Changed keys, as for fedloom run: rounds=20.")]
Count = Annotated[int, typer.Option("--nodes", help="Number of machines. The first one runs the server.")]
Cores = Annotated[int, typer.Option("--cpus", help="Cores of each machine.")]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of each machine. Each worker gets one, or engine.num_gpus of it.")]
Time = Annotated[str, typer.Option("--time", help="Time limit: [DAYS-]HOURS:MINUTES:SECONDS.")]
Image = Annotated[str, typer.Option("--image", help="A container image that contains fedloom.")]
Environment = Annotated[str, typer.Option("--environment", help="Folder of a Python environment, the same on all machines.")]
Port = Annotated[int, typer.Option("--port", help="Port of Ray on the first machine.")]
Write = Annotated[Path | None, typer.Option("--write", help="Write to this new file. Default: print.")]


@app.command()
def slurm(
    experiment: Experiment = "digits", words: Words = None, nodes: Count = 2, cpus: Cores = 8, gpus: Gpus = 0,
    time: Time = "24:00:00", image: Image = "", environment: Environment = "", port: Port = 6379,
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    account: Annotated[str, typer.Option(help="Slurm account.")] = "",
    write: Write = None,
) -> None:  # fmt: skip
    """Write a batch file for Slurm's sbatch."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.slurm import batch_file

    shape = {"nodes": nodes, "cpus": cpus, "gpus": gpus, "time": time, "image": image, "environment": environment}
    text = batch_file(job(experiment, words or [], {**shape, "port": port}), {"partition": partition, "account": account})
    _emit(text, write, [f"sbatch {write}"])


@app.command()
def kubernetes(
    experiment: Experiment = "digits", words: Words = None, nodes: Count = 2, cpus: Cores = 8, gpus: Gpus = 0,
    time: Time = "24:00:00", image: Image = "", environment: Environment = "",
    claim: Annotated[str, typer.Option(help="Persistent volume claim for runs and data.")] = "",
    memory: Annotated[str, typer.Option(help="Memory of each machine.")] = "16Gi",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace.")] = "default",
    write: Write = None,
) -> None:  # fmt: skip
    """Write a RayJob for kubectl apply. It needs the KubeRay operator."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.kubernetes import ray_job

    shape = {"nodes": nodes, "cpus": cpus, "gpus": gpus, "time": time, "image": image, "environment": environment}
    text = ray_job(job(experiment, words or [], shape), {"claim": claim, "memory": memory, "namespace": namespace})
    _emit(text, write, [f"kubectl apply -f {write}"])


@app.command()
def ssh(
    experiment: Experiment = "digits", words: Words = None, cpus: Cores = 8, gpus: Gpus = 0,
    image: Image = "", environment: Environment = "", port: Port = 6379,
    hosts: Annotated[str, typer.Option(help="Machines, separated by commas. The first one runs the server.")] = "",
    user: Annotated[str, typer.Option(help="User name for SSH.")] = "",
    key: Annotated[str, typer.Option(help="Private key for SSH.")] = "",
    write: Write = None,
) -> None:  # fmt: skip
    """Write a YAML file for ray up, which starts Ray by SSH."""
    from fedloom.sims.clusters.job import job
    from fedloom.sims.clusters.ssh import cluster_file, commands

    names = [host for host in hosts.split(",") if host]
    shape = {"nodes": max(1, len(names)), "cpus": cpus, "gpus": gpus, "image": image, "environment": environment}
    cluster_job, path = job(experiment, words or [], {**shape, "port": port}), str(write or "")
    _emit(cluster_file(cluster_job, {"hosts": names, "user": user, "key": key}, path), write, commands(cluster_job, path))


def _emit(text: str, file: Path | None, then: list[str]) -> None:
    """Print the text, or write it to the file and print the next commands."""
    if file is None:
        typer.echo(text, nl=False)
        return
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"--write: {file} exists already; name another file") from None
    except FileNotFoundError:
        raise UserError(f"--write: the folder {file.parent} does not exist; make it, or name another") from None
    typer.echo(f"Written: {file}. Start the run with:")
    for line in then:
        typer.echo(f"  {line}")
