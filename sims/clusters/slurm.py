"""A batch file for Slurm: Ray on every node of the allocation, the run on the first."""

import re
import shlex
from dataclasses import dataclass

from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import PATH, ClusterJob, checked

_WORD = re.compile(r"[A-Za-z0-9_.,@-]*")
_START = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port={port}
step=(srun --ntasks-per-node=1 --cpus-per-task={cpus}{container})
node=(--num-cpus={cpus} --num-gpus={gpus} --disable-usage-stats --block)
trap 'kill $(jobs -p) 2>/dev/null' EXIT

"${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$head" \\
  ray start --head --port="$port" --include-dashboard=false "${{node[@]}}" &
"""
_JOIN = """\
for _ in $(seq 300); do  # seconds
  if (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; then break; fi
  sleep 1
done
"""
_OTHERS = """\
"${{step[@]}}" --nodes={others} --ntasks={others} --exclude="$head" \\
  ray start --address="$head:$port" "${{node[@]}}" &
"""
_RUN = """\
"${{step[@]}}" --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
  {command}"$head:$port"
"""


@dataclass(frozen=True)
class Queue:
    """What Slurm alone wants to know."""

    partition: str = option("", "Slurm's; empty: its default")
    account: str = option("", "Slurm's; empty: the user's default")


def batch_file(job: ClusterJob, options: dict) -> str:
    """The file for `sbatch`. A node that is lost does not end the job: its sites are trained by the others (--no-kill)."""
    queue = build(Queue, options)
    for name in ("partition", "account"):
        checked(f"--{name}", getattr(queue, name), _WORD, "a name of letters, digits, '-', '_', '.', ',' and '@'")
    checked("--image", job.nodes.image, PATH, "a text in one line")
    nodes = job.nodes
    asked = {"job-name": job.name, "output": f"{job.name}-%j.log", "nodes": nodes.nodes, "ntasks-per-node": 1,
             "cpus-per-task": nodes.cpus, "gpus-per-node": nodes.gpus, "time": nodes.time, "partition": queue.partition,
             "account": queue.account}  # fmt: skip
    lines = [f"#SBATCH --{name}={given}" for name, given in asked.items() if given]
    parts = [_START, _JOIN, _OTHERS, _RUN] if nodes.nodes > 1 else [_START, _JOIN, _RUN]
    container = f' --container-image={shlex.quote(nodes.image)} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
    body = "\n".join(parts).format(
        cpus=nodes.cpus,
        gpus=nodes.gpus,
        port=nodes.port,
        others=nodes.nodes - 1,
        container=container if nodes.image else "",
        command=shlex.join(job.command("")),
    )
    head = ["#!/bin/bash", *lines, "#SBATCH --no-kill", "set -euo pipefail", *filter(None, [job.path()])]
    return "\n".join(head) + "\n" + body
