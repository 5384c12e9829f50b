"""Manifests of Kubernetes jobs with a first pod and others of the same kind: JobSet, PyTorchJob and Volcano's Job.

Fields: JobSet jobset.x-k8s.io/v1alpha2, PyTorchJob kubeflow.org/v1 (training-operator 1.9), Job
batch.volcano.sh/v1alpha1. Each gives every pod a stable name, by which the others reach it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagcore.errors import UsageError
from flagcore.i18n import _

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Valid names of jobs. They are short, because the name of a pod is longer, and is a DNS label of at most 63
characters.
"""
FIRST, OTHERS = "first", "others"
RESTARTS = 3
"""How often a job is started again, for example after a preemption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a job. `first` and `others` are shell commands, in which `{rank}` is the number of the pod.

    `limits` are the resources of each pod. `secrets` maps variables to the name and key of their secret. `claim` is a
    persistent volume claim, mounted at `mount`; empty for none. `first_ends` is whether the job ends with its first
    pod; otherwise it ends with all pods.
    """

    name: str
    image: str
    count: int
    first: str
    others: str
    directory: str
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    claim: str = ""
    mount: str = ""
    first_ends: bool = False


def job_name(text: str) -> str:
    """Return a valid name of a job from a text."""
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", text.lower()))[:40].rstrip("-") or "flagcore"


def checked_name(name: str) -> str:
    """Return `name`. Raises UsageError if it is not a valid name of a job."""
    if not NAME.fullmatch(name):
        raise UsageError(_("--name = {name!r}: use at most 40 lower-case letters, digits and dashes", name=name))
    return name


def _jobset_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-{FIRST}-0-0.{name}", *(f"{name}-{OTHERS}-0-{number}.{name}" for number in range(count - 1))]


def _pytorch_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(count - 1))]


def _volcano_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-{FIRST}-0.{name}", *(f"{name}-{OTHERS}-{number}.{name}" for number in range(count - 1))]


def pod_template(pods: Pods, command: str, restart: str, container: str = "flagcore") -> dict[str, Any]:
    """Return the template of a pod. Devices exchange data through /dev/shm, which is 64 MB without a volume."""
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in pods.environment.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}}
        for name, (where, key) in pods.secrets.items()
    ]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "data", "mountPath": pods.mount})
    one = {
        "name": container,
        "image": pods.image,
        "command": ["sh", "-c", command.replace("$$", "$$$$")],  # Kubernetes reads $$ as $
        **({"workingDir": pods.directory} if pods.directory else {}),
        "env": variables + secret,
        "resources": {"limits": dict(pods.limits)},
        "volumeMounts": mounts,
    }
    return {"spec": {"restartPolicy": restart, "containers": [one], "volumes": volumes}}


def _groups(pods: Pods, first_rank: str, other_rank: str) -> list[tuple[str, int, str]]:
    """Return the name, the size and the command of each group of pods."""
    groups = [(FIRST, 1, pods.first.replace("{rank}", first_rank))]
    return groups + [(OTHERS, pods.count - 1, pods.others.replace("{rank}", other_rank))] * (pods.count > 1)


def _jobset(pods: Pods) -> dict[str, Any]:
    def job(name: str, count: int, command: str) -> dict[str, Any]:
        spec = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": RESTARTS}
        restart = "OnFailure" if name == OTHERS and pods.first_ends else "Never"
        template = {"spec": {**spec, "template": pod_template(pods, command, restart)}}
        return {"name": name, "replicas": 1, "template": template}

    jobs = [job(*group) for group in _groups(pods, "0", "$((JOB_COMPLETION_INDEX + 1))")]
    success_policy = {"successPolicy": {"operator": "All", "targetReplicatedJobs": [FIRST]}} if pods.first_ends else {}
    spec = {"failurePolicy": {"maxRestarts": RESTARTS}, **success_policy, "replicatedJobs": jobs}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": pods.name}, "spec": spec}


def _pytorch(pods: Pods) -> dict[str, Any]:
    names = {FIRST: "Master", OTHERS: "Worker"}
    replicas: dict[str, dict[str, Any]] = {
        names[name]: {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": pod_template(pods, command, "OnFailure", "pytorch"),
        }
        for name, count, command in _groups(pods, "$RANK", "$RANK")
    }
    for each in replicas.values():
        del each["template"]["spec"]["restartPolicy"]  # that of the replica counts
    policy = {
        "backoffLimit": RESTARTS,
        "cleanPodPolicy": "All" if pods.first_ends else "None",
        "schedulingPolicy": {"minAvailable": pods.count},
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": pods.name}, "spec": spec}


def _volcano(pods: Pods) -> dict[str, Any]:
    def task(name: str, count: int, command: str) -> dict[str, Any]:
        restart = "OnFailure" if name == OTHERS and pods.first_ends else "Never"
        template = pod_template(pods, command, restart)
        ends_job = name == FIRST and pods.first_ends
        completion_policy = {"policies": [{"event": "TaskCompleted", "action": "CompleteJob"}]} if ends_job else {}
        return {"name": name, "replicas": count, **completion_policy, "template": template}

    spec = {
        "schedulerName": "volcano",
        "minAvailable": pods.count,
        "maxRetry": RESTARTS,
        "plugins": {"svc": [], "env": []},
        "policies": [{"event": event, "action": "RestartJob"} for event in ("PodEvicted", "PodFailed")],
        "tasks": [task(*group) for group in _groups(pods, "0", "$((VC_TASK_INDEX + 1))")],
    }
    return {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": pods.name}, "spec": spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job: a function that returns its manifest, and one that returns the host names of its pods in order."""

    manifest: Callable[[Pods], dict[str, Any]]
    hosts: Callable[[str, int], list[str]]


KINDS = {
    "jobset": Kind(manifest=_jobset, hosts=_jobset_hosts),
    "pytorchjob": Kind(manifest=_pytorch, hosts=_pytorch_hosts),
    "volcano": Kind(manifest=_volcano, hosts=_volcano_hosts),
}
