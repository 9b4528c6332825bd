"""`fedloom cluster`: each file passes its own validator, and nothing that a user names is run by a shell."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.testing import CliRunner

from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError, load
from fedloom.fusion.state import digest
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.cli.main import app
from fedloom.sims.clusters.job import job
from fedloom.sims.clusters.kubernetes import ray_job
from fedloom.sims.clusters.slurm import batch_file
from fedloom.sims.clusters.ssh import cluster_file, commands
from fedloom.sims.engines import open_engine

EVIL = ["run.root=a b'\"; $(touch pwned) `touch pwned` $HOME %x"]
PODS = {"claim": "work", "memory": "8Gi"}
HOSTS = {"hosts": ["one.example", "10.0.0.2"], "user": "me"}


def made(*words: str, **nodes: Any):
    return job("digits", list(words), {"image": "registry/fedloom:0.1", **nodes})


def said(command: str, *folders: Path) -> list[list[str]]:
    """The words with which bash calls `fedloom` when it runs a line; other programs are not found."""
    script = f"fedloom() {{ printf '%s\\0' \"$@\"; printf '\\1'; }}\n{command}\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=folders[0])
    return [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("words", [[], EVIL], ids=["plain", "evil"])
def test_a_batch_file_is_good_bash(tmp_path: Path, nodes: int, words: list[str]):
    text = batch_file(made(*words, nodes=nodes, gpus=2, environment="/opt/my env$(x)", image="x y"), {"partition": "gpu"})
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    check = [Path(sys.executable).parent / "shellcheck", "--severity=warning", tmp_path / "job.sh"]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["partition"]) == (str(nodes), "2", "gpu")


def test_what_a_user_names_reaches_fedloom_as_it_is_and_runs_nothing(tmp_path: Path):
    one = made(*EVIL)
    text = batch_file(one, {})
    (ours,) = said("step=(fedloom); head=h; port=1\n" + text[text.rindex('"${step[@]}"') :], tmp_path)
    assert ours[ours.index("fedloom") :][:4] == ["fedloom", "run", "digits", EVIL[0]]
    entry = yaml.safe_load(ray_job(one, PODS))["spec"]["entrypoint"]
    assert said(entry, tmp_path) == [one.command("auto")[1:]]
    line = shlex.split(commands(one, "a file.yaml")[1])
    assert line[:3] == ["ray", "exec", "a file.yaml"] and EVIL[0] in said(line[3], tmp_path)[0]
    assert not list(tmp_path.iterdir())


def test_the_file_for_ray_up_passes_rays_own_validation():
    text = cluster_file(made(*EVIL, environment="/opt/my env"), HOSTS)
    read = yaml.safe_load(text)
    validate_config(prepare_config(read))
    assert read["provider"] == {"type": "local", "head_ip": "one.example", "worker_ips": ["10.0.0.2"]}
    assert text.count("\n# ") == 2  # nothing of the words ends its comment


def test_a_ray_job_holds_what_kuberay_takes_and_its_pods_pass_kubernetes_schema():
    one = made("engine.num_gpus=0.5", nodes=3, cpus=4, gpus=2, time="1-02:00:00", environment="/opt/env")
    read = yaml.safe_load(ray_job(one, PODS))
    assert (read["apiVersion"], read["kind"], read["metadata"]["name"]) == ("ray.io/v1", "RayJob", "fedloom-digits")
    cluster = read["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert read["spec"]["activeDeadlineSeconds"] == 26 * 3600
    assert {workers[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {2}
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(text, str) for text in group["rayStartParams"].values())
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)
    assert "engine.workers=12" in read["spec"]["entrypoint"]
    assert ray_job(made(nodes=1), PODS).count("nvidia.com/gpu") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "digits", "--time", "3"], "--time: got '3', takes"),
        (["slurm", "digits", "--partition", "a\n#SBATCH --uid=0"], "partition: got"),
        (["slurm", "digits", "rounds=1\nrm"], "the run's words: got"),
        (["slurm", "digits", "engine.address=x:1"], "engine.address: the file itself sets it"),
        (["slurm", "digits", "engine.workers=17"], "have room for 16 (engine.num_cpus, engine.num_gpus), not for 17"),
        (["slurm", "digits", "--gpus", "1", "engine.num_gpus=2"], "have room for 0"),
        (["slurm", "digits", "--nodes", "0"], "nodes: got 0"),
        (["slurm", "digtis"], "digits"),
        (["kubernetes", "digits", "--image", "x"], "--image, --claim: name an image"),
        (["kubernetes", "digits", "--image", "x", "--claim", "A"], "--claim: got 'A', takes a Kubernetes name"),
        (["ssh", "digits", "--user", "me"], "--hosts: got 0 machines for 1 nodes"),
        (["ssh", "digits", "--user", "me", "--hosts", "-oProxyCommand=x"], "--hosts: got '-oProxyCommand=x'"),
        (["ssh", "digits", "--user", "me", "--hosts", "a,a"], "--hosts: names 'a' twice"),
        (["ssh", "digits", "--user", "me", "--hosts", "a", "data.root=x\u2028evil: 1"], "the run's words: got"),
        (["ssh", "digits", "--user", "me", "--hosts", "a", "--write", "q\nevil: 1"], "--write: got 'q evil: 1'"),
        (
            ["ssh", "digits", "--user", "me", "--hosts", "a", "--image", "$(touch x)"],
            "--image: got '$(touch x)', takes",
        ),
        (["slurm", "digits", "--time", "00:00:00"], "--time: got 00:00:00, takes more than nothing"),
        (["ssh", "digits", "--hosts", "a"], "--user: got '', takes whom to log in as"),
    ],
)
def test_bad_input_is_one_clear_line(words: list[str], message: str):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        CliRunner().invoke(app, ["cluster", *words], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_a_file_is_written_once_and_what_to_type_is_said(tmp_path: Path):
    place = tmp_path / "run.sh"
    done = CliRunner().invoke(app, ["cluster", "slurm", "digits", "--write", str(place)])
    assert done.exit_code == 0 and f"sbatch {place}" in done.output
    assert place.read_text() == CliRunner().invoke(app, ["cluster", "slurm", "digits"]).output
    with pytest.raises(UserError, match="exists already"):
        CliRunner().invoke(app, ["cluster", "slurm", "digits", "--write", str(place)], catch_exceptions=False)


SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
case "$*" in *--address=*) echo $$ > "$FOLDER/second";; esac
exec "$@"
"""
SMALL = ["rounds=4", "sites=[{domain: digits, count: 6, samples: 60}]", "data.size=8", "evaluation.every=4"]


@pytest.mark.slow
def test_a_batch_file_starts_two_ray_nodes_and_the_run_outlives_one(tmp_path: Path):
    """Slurm's two programs are replaced by ones that start the same commands here, each Ray node a process of its own."""
    tools = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = {"nodes": 2, "cpus": 1, "port": port, "environment": str(Path(sys.executable).parent.parent)}
    (tmp_path / "job.sh").write_text(batch_file(job("digits", [*SMALL, f"run.root={tmp_path}/there"], nodes), {}))
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "SLURM_JOB_NODELIST": "x"}
    running = subprocess.Popen(["bash", tmp_path / "job.sh"], env={**os.environ, **paths}, start_new_session=True)
    metrics = tmp_path / "there" / "digits" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and running.poll() is None:
        time.sleep(0.05)
    _kill_tree(int((tmp_path / "second").read_text()))
    assert running.wait(timeout=120) == 0
    config = load("digits", [*SMALL, f"run.root={tmp_path}/here", "engine.name=inline"])
    with open_engine(config) as grid:
        run_experiment(grid, config, LogListener())
    found = [
        digest(read_state(tmp_path / place / "digits" / "states" / "aggregate.safetensors")) for place in ("here", "there")
    ]
    assert found[0] == found[1]


def _kill_tree(root: int) -> None:
    """Kill a process and all that came of it, at once."""
    from fedloom.sims.progress.memory import descendants

    for process in [*descendants(root)][::-1]:
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            continue
