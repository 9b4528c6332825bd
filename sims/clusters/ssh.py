"""A YAML file for Ray's own cluster launcher (`ray up`): machines that are there and are reached by SSH."""

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import IMAGE, PATH, ClusterJob, checked

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Machines:
    """What is to be known of machines that are reached by SSH."""

    hosts: list[str] = option([], "names or addresses, as many as --nodes; the first is where the run's server is")
    user: str = option("", "whom to log in as")
    key: str = option("", "private key to log in with; empty: as SSH is configured")


def cluster_file(job: ClusterJob, options: dict, where: str = "") -> str:
    """The YAML for `ray up`; its first lines say which commands start the cluster, the run, and end both.

    `where` the file will be. A container takes the place of the machine's own Python if the job has an image.
    """
    machines = build(Machines, options)
    if len(machines.hosts) != job.nodes.nodes:
        raise UserError(
            f"--hosts: got {len(machines.hosts)} machines for {job.nodes.nodes} nodes; name every one, with ',' between"
        )
    if twice := [host for place, host in enumerate(machines.hosts) if host in machines.hosts[:place]]:
        raise UserError(f"--hosts: names '{twice[0]}' twice; each node is a machine of its own")
    for host in machines.hosts:
        checked("--hosts", host, _HOST, "names or addresses of machines")
    checked("--user", machines.user, _USER, "whom to log in as, such as $USER")
    if job.nodes.image:
        checked("--image", job.nodes.image, IMAGE, "an image, such as registry/fedloom:0.1")
    checked("--write", where, PATH, "a text in one line")
    checked("--key", machines.key, PATH, "the path of a private key")
    head, *others = machines.hosts
    whole = {
        "cluster_name": job.name,
        "max_workers": len(others),
        "provider": {"type": "local", "head_ip": head, "worker_ips": others},
        "auth": {"ssh_user": machines.user, **({"ssh_private_key": machines.key} if machines.key else {})},
        **_container(job),
        **_starts(job),
    }
    return "".join(f"# {line}\n" for line in commands(job, where)) + yaml.safe_dump(whole, sort_keys=False, width=1000)


def commands(job: ClusterJob, where: str) -> list[str]:
    """What to type: the cluster's start, the run, and its end."""
    file = shlex.quote(where or f"{job.name}.yaml")
    line = " && ".join(filter(None, [job.path(), shlex.join(job.command(f"127.0.0.1:{job.nodes.port}"))]))
    return [f"ray up --yes {file}", f"ray exec {file} {shlex.quote(line)}", f"ray down --yes {file}"]


def _starts(job: ClusterJob) -> dict[str, list[str]]:
    """How Ray starts: what ran on these machines before is stopped first, as in Ray's own examples."""
    node = f"--num-cpus={job.nodes.cpus} --num-gpus={job.nodes.gpus} --disable-usage-stats"
    before = [job.path()] if job.nodes.environment else []
    stop, port = " && ".join([*before, "ray stop"]), job.nodes.port
    first = f"ray start --head --port={port} --autoscaling-config=~/ray_bootstrap_config.yaml {node}"
    further = f"ray start --address=$RAY_HEAD_IP:{port} {node}"
    return {"head_start_ray_commands": [stop, " && ".join([*before, first])],
            "worker_start_ray_commands": [stop, " && ".join([*before, further])]}  # fmt: skip


def _container(job: ClusterJob) -> dict[str, Any]:
    if not job.nodes.image:
        return {}
    given = "--gpus=all" if job.nodes.gpus else ""
    return {"docker": {"image": job.nodes.image, "container_name": job.name, "run_options": [given] if given else []}}
