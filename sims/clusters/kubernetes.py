"""A RayJob for Kubernetes with the KubeRay operator: a cluster for one run. It ends with the run."""

import re
import shlex
from dataclasses import dataclass
from importlib.metadata import version

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build, option
from fedloom.sims.clusters.job import IMAGE, ClusterJob, checked, filled

NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)"), "a Kubernetes name: small letters, digits, '-'"
MEMORY = re.compile(r"[1-9]\d{0,5}(?:Mi|Gi|Ti)"), "a size, such as 16Gi"
# In HTTPMode one shell reads the entrypoint; in K8sJobMode two shells do, which need other quotes.
FILE = """\
apiVersion: ray.io/v1
kind: RayJob
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  entrypoint: {entrypoint}
  submissionMode: HTTPMode
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  activeDeadlineSeconds: {seconds}
  rayClusterSpec:
    rayVersion: {version}
    headGroupSpec:
      rayStartParams: {{num-cpus: {cpus}, num-gpus: {gpus}, dashboard-host: "0.0.0.0"}}
      template: &pod
        spec:
          containers:
          - name: ray
            image: {image}
            workingDir: /fedloom
            env: {environment}
            resources:
              requests: &room {room}
              limits: *room
            volumeMounts: [{{name: work, mountPath: /fedloom}}]
          volumes: [{{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""
WORKERS = """\
    workerGroupSpecs:
    - groupName: workers
      replicas: {others}
      minReplicas: {others}
      maxReplicas: {others}
      rayStartParams: {{num-cpus: {cpus}, num-gpus: {gpus}}}
      template: *pod
"""


@dataclass(frozen=True)
class Pods:
    """The options of a RayJob for Kubernetes."""

    claim: str = option("", "persistent volume claim: the run's folder is in its runs/, data in its data/")
    memory: str = option("16Gi", "of each node")
    namespace: str = option("default", "Kubernetes' namespace")


def ray_job(job: ClusterJob, options: dict) -> str:
    """Return the YAML of the job, for `kubectl apply`. The run's files remain in the claim's volume."""
    pods, nodes = build(Pods, options), job.nodes
    if not (nodes.image and pods.claim):
        raise UserError("--image, --claim: name an image with fedloom, and the volume for the run's folder")
    checked("--image", nodes.image, IMAGE)
    checked("--memory", pods.memory, MEMORY)
    for name in ("claim", "namespace"):
        checked(f"--{name}", getattr(pods, name), NAME)
    has_root = any(word.startswith("run.root=") for word in job.arguments)
    variables = {"FEDLOOM_DATA": "/fedloom/data"}
    if nodes.environment:
        variables["PATH"] = f"{nodes.environment}/bin:/usr/local/bin:/usr/bin:/bin"
    gpus = {"nvidia.com/gpu": str(nodes.gpus)} if nodes.gpus else {}
    return filled(
        FILE + (WORKERS if nodes.nodes > 1 else ""),
        name=job.name, namespace=pods.namespace, seconds=job.seconds, version=version("ray"), image=nodes.image,
        entrypoint=shlex.join(job.command("auto", *([] if has_root else ["run.root=/fedloom/runs"]))),
        cpus=str(nodes.cpus), gpus=str(nodes.gpus), claim=pods.claim, others=nodes.nodes - 1,
        room={"cpu": str(nodes.cpus), "memory": pods.memory, **gpus},
        environment=[{"name": name, "value": text} for name, text in variables.items()],
    )  # fmt: skip
