"""A YAML file for Ray's own cluster launcher (`ray up`): existing machines that are reached by SSH."""

import re
import shlex
from dataclasses import dataclass

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import IMAGE, LINE, ClusterJob, checked, filled

HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?"), "names or addresses of machines"
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"), "whom to log in as, such as $USER"
FILE = """\
cluster_name: {name}
max_workers: {others}
provider: {{type: local, head_ip: {head}, worker_ips: {workers}}}
auth: {auth}
head_start_ray_commands: [{stop}, {start_head}]
worker_start_ray_commands: [{stop}, {start_worker}]
"""
CONTAINER = "docker: {{image: {image}, container_name: {name}, run_options: {options}}}\n"


@dataclass(frozen=True)
class Machines:
    """The options of machines that are reached by SSH."""

    hosts: list[str] = option([], "names or addresses, one for each node; the run's server is on the first")
    user: str = option("", "user name for SSH")
    key: str = option("", "private key for SSH; empty: SSH's own configuration")


def cluster_file(job: ClusterJob, options: dict, path: str = "") -> str:
    """Return the YAML for `ray up`. Its first lines are the commands that start the cluster, the run, and end both.

    Ray stops any other Ray on these machines first. If the job has an image, its container replaces the machine's Python.

    Args:
        path: Of the file, for the commands.
    """
    machines, nodes = build(Machines, options), job.nodes
    if len(machines.hosts) != nodes.nodes:
        raise UserError(f"--hosts: got {len(machines.hosts)} machines for {nodes.nodes} nodes; name all, separated by ','")
    if twice := [host for index, host in enumerate(machines.hosts) if host in machines.hosts[:index]]:
        raise UserError(f"--hosts: names '{twice[0]}' twice; each node is another machine")
    for host in machines.hosts:
        checked("--hosts", host, HOST)
    checked("--user", machines.user, USER)
    checked("--write", path, LINE)
    checked("--key", machines.key, (LINE[0], "the path of a private key"))
    node = f"--num-cpus={nodes.cpus} --num-gpus={nodes.gpus} --disable-usage-stats"
    before = f"{job.path()} && " if nodes.environment else ""
    text = filled(
        FILE, name=job.name, others=nodes.nodes - 1, head=machines.hosts[0], workers=machines.hosts[1:],
        auth={"ssh_user": machines.user, **({"ssh_private_key": machines.key} if machines.key else {})},
        stop=f"{before}ray stop", start_worker=f"{before}ray start --address=$RAY_HEAD_IP:{nodes.port} {node}",
        start_head=f"{before}ray start --head --port={nodes.port} --autoscaling-config=~/ray_bootstrap_config.yaml {node}",
    )  # fmt: skip
    if nodes.image:
        checked("--image", nodes.image, IMAGE)
        text += filled(CONTAINER, image=nodes.image, name=job.name, options=["--gpus=all"] if nodes.gpus else [])
    return "".join(f"# {line}\n" for line in commands(job, path)) + text


def commands(job: ClusterJob, path: str) -> list[str]:
    """Return the shell commands that start the cluster, start the run, and end both."""
    file = shlex.quote(path or f"{job.name}.yaml")
    line = " && ".join(filter(None, [job.path(), shlex.join(job.command(f"127.0.0.1:{job.nodes.port}"))]))
    return [f"ray up --yes {file}", f"ray exec {file} {shlex.quote(line)}", f"ray down --yes {file}"]
