"""A batch file for Slurm: Ray on every node of the allocation, the run on the first."""

import re
import shlex
from dataclasses import dataclass

from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import ClusterJob, checked

NAME = re.compile(r"[A-Za-z0-9_.,@-]*"), "a name of letters, digits, '-', '_', '.', ',' and '@'"
FILE = """\
#!/bin/bash
{settings}#SBATCH --no-kill
set -euo pipefail
{path}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port={port}
step=(srun --ntasks-per-node=1 --cpus-per-task={cpus}{container})
node=(--num-cpus={cpus} --num-gpus={gpus} --disable-usage-stats --block)
trap 'kill $(jobs -p) 2>/dev/null' EXIT

"${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$head" \\
  ray start --head --port="$port" --include-dashboard=false "${{node[@]}}" &
for _ in $(seq 300); do  # seconds
  if (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; then break; fi
  sleep 1
done
{join}
"${{step[@]}}" --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
  {command}"$head:$port"
"""
JOIN = """
"${{step[@]}}" --nodes={others} --ntasks={others} --exclude="$head" \\
  ray start --address="$head:$port" "${{node[@]}}" &
"""


@dataclass(frozen=True)
class Queue:
    """The options of Slurm."""

    partition: str = option("", "Slurm's partition; empty: its default")
    account: str = option("", "Slurm's account; empty: the user's default")


def batch_file(job: ClusterJob, options: dict) -> str:
    """Return the text of the file for `sbatch`. A lost node does not end the job (--no-kill): the others train its sites."""
    queue, nodes = build(Queue, options), job.nodes
    for name in ("partition", "account"):
        checked(f"--{name}", getattr(queue, name), NAME)
    settings = {"job-name": job.name, "output": f"{job.name}-%j.log", "nodes": nodes.nodes, "ntasks-per-node": 1,
                "cpus-per-task": nodes.cpus, "gpus-per-node": nodes.gpus, "time": nodes.time, "partition": queue.partition,
                "account": queue.account}  # fmt: skip
    container = f' --container-image={shlex.quote(nodes.image)} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
    return FILE.format(
        settings="".join(f"#SBATCH --{name}={value}\n" for name, value in settings.items() if value),
        path=job.path(), port=nodes.port, cpus=nodes.cpus, gpus=nodes.gpus, container=container if nodes.image else "",
        join=JOIN.format(others=nodes.nodes - 1) if nodes.nodes > 1 else "", command=shlex.join(job.command("")),
    )  # fmt: skip
