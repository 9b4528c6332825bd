"""A RayJob for Kubernetes with the KubeRay operator: a cluster that is there for one run."""

import re
import shlex
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import IMAGE, ClusterJob, checked

WORK = "/fedloom"  # where the volume is mounted
_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)")
_MEMORY = re.compile(r"[1-9]\d{0,5}(?:Mi|Gi|Ti)")
_KEPT_SECONDS = 600  # the job's description, after its end


@dataclass(frozen=True)
class Pods:
    """What Kubernetes alone wants to know."""

    claim: str = option("", "persistent volume claim: the run's folder is in its runs/, data in its data/")
    memory: str = option("16Gi", "of each node")
    namespace: str = option("default", "Kubernetes' own")


def ray_job(job: ClusterJob, options: dict) -> str:
    """The YAML for `kubectl apply`. The cluster goes when the run ends; what the run wrote stays in the claim's volume."""
    pods = build(Pods, options)
    if not (job.nodes.image and pods.claim):
        raise UserError("--image, --claim: name an image with fedloom in it, and the volume in which the run's folder stays")
    checked("--image", job.nodes.image, IMAGE, "an image, such as registry/fedloom:0.1")
    checked("--memory", pods.memory, _MEMORY, "a size, such as 16Gi")
    for name in ("claim", "namespace"):
        checked(f"--{name}", getattr(pods, name), _NAME, "a Kubernetes name: small letters, digits, '-'")
    rooted = any(word.startswith("run.root=") for word in job.words)
    command = job.command("auto", *([] if rooted else [f"run.root={WORK}/runs"]))
    spec = {
        "entrypoint": shlex.join(command),
        "submissionMode": "HTTPMode",  # one shell reads the entrypoint; in K8sJobMode there are two, with other quotes
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "activeDeadlineSeconds": job.seconds,
        "rayClusterSpec": _cluster(job, pods),
    }
    whole = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": job.name, "namespace": pods.namespace}}
    return yaml.safe_dump({**whole, "spec": spec}, sort_keys=False, width=1000)


def _cluster(job: ClusterJob, pods: Pods) -> dict[str, Any]:
    start = {"num-cpus": str(job.nodes.cpus), "num-gpus": str(job.nodes.gpus)}
    head = {"rayStartParams": {**start, "dashboard-host": "0.0.0.0"}, "template": pod(job, pods, "ray-head")}
    others = job.nodes.nodes - 1
    worker = {"groupName": "workers", "replicas": others, "minReplicas": others, "maxReplicas": others,
              "rayStartParams": start, "template": pod(job, pods, "ray-worker")}  # fmt: skip
    return {"rayVersion": version("ray"), "headGroupSpec": head, "workerGroupSpecs": [worker] if others else []}


def pod(job: ClusterJob, pods: Pods, name: str) -> dict[str, Any]:
    """The template of a node's pod: all of a node's cores, memory and GPUs for one container, the volume in it."""
    room = {"cpu": str(job.nodes.cpus), "memory": pods.memory}
    room |= {"nvidia.com/gpu": str(job.nodes.gpus)} if job.nodes.gpus else {}
    environment = {"FEDLOOM_DATA": f"{WORK}/data", **({"PATH": _path(job)} if job.nodes.environment else {})}
    container = {
        "name": name,
        "image": job.nodes.image,
        "workingDir": WORK,
        "env": [{"name": key, "value": text} for key, text in environment.items()],
        "resources": {"requests": room, "limits": dict(room)},
        "volumeMounts": [{"name": "work", "mountPath": WORK}],
    }
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": pods.claim}}
    return {"spec": {"containers": [container], "volumes": [volume]}}


def _path(job: ClusterJob) -> str:
    return f"{job.nodes.environment}/bin:/usr/local/bin:/usr/bin:/bin"
