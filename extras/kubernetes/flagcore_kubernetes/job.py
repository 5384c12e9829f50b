"""Manifests: a job that tunes a spec, a job that trains with a candidate, or a Deployment with a Service.

A job is a JobSet, a PyTorchJob or Volcano's Job, with a first pod and others. The fields are from JobSet
jobset.x-k8s.io/v1alpha2, PyTorchJob kubeflow.org/v1 (training-operator 1.9), Job batch.volcano.sh/v1alpha1. Each kind
gives every pod a stable name, by which the other pods reach it.
"""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flagcore.contracts import ExportJob, Platform
from flagcore.contracts.exchange import DEVICES_OF_HOST, claim_and_mount, comments, device_limits, shell_quoted
from flagcore.domain.engine import without_devices
from flagcore.domain.launch import ServerGroups
from flagcore.domain.secrets import is_secret
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore.launchers.script import MASTER_PORT
from flagcore.spec.plain_data import dump_yaml
from flagcore_kubernetes.join import TOKEN

HOSTS = "FLAGCORE_HOSTS"
"""Environment variable that contains the names of the job's pods, the tuning pod first."""
FIRST, OTHERS = "first", "others"
RESTARTS = 3
"""How often a job is started again, for example after a preemption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a job. `first` and `others` are shell commands, in which `{rank}` is the number of the pod.

    `limits` are the resources of each pod. `secrets` maps variables to the name and key of their secret. `claim` is a
    persistent volume claim, mounted at `mount`; it is empty if there is none. With `first_ends` the job ends when its
    first pod ends, otherwise when all pods have ended.
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


def _jobset_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-{FIRST}-0-0.{name}", *(f"{name}-{OTHERS}-0-{number}.{name}" for number in range(count - 1))]


def _pytorch_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(count - 1))]


def _volcano_hosts(name: str, count: int) -> list[str]:
    return [f"{name}-{FIRST}-0.{name}", *(f"{name}-{OTHERS}-{number}.{name}" for number in range(count - 1))]


def pod_template(pods: Pods, command: str, restart: str, container: str = "flagcore") -> dict[str, Any]:
    """Return the template of a pod. It mounts /dev/shm, through which devices exchange data: the default is only 64
    MB.
    """
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
    """Return the name, the number of pods and the command of each group of pods."""
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
        del each["template"]["spec"]["restartPolicy"]  # a PyTorchJob uses the policy of the replica
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


IN_SHELL = {"{node_rank}": "NODE_RANK", **DEVICES_OF_HOST}
"""Maps placeholders to variables and commands in the shell of a pod."""


def export(job: ExportJob) -> Mapping[str, str]:
    """Return the manifest of a job. Raises UsageError if there is no image, or for a server on several hosts."""
    image, kind = job.options.get("image"), job.options.get("kind", "jobset")
    if not image:
        raise UsageError(_("--to kubernetes needs --image, an image with the program of the candidate"))
    if job.is_server and not job.launch.ready:
        raise UsageError(_("--to kubernetes starts each server in one pod; for several hosts use --to slurm"))
    claim, mount = claim_and_mount(job.options.get("volume", ""))
    count = 1 if job.launch.ready else job.nodes
    hosts = KINDS[kind].hosts(job.name, count)
    environment, secrets = _environment(job, hosts)
    of_host = {name: value for name, value in environment.items() if any(each in value for each in IN_SHELL)}
    pods = Pods(
        name=job.name,
        image=image,
        count=count,
        first=(command := _command(job, hosts, of_host)),
        others=command,
        directory=job.launch.directory or "",
        environment={name: value for name, value in environment.items() if name not in of_host},
        limits=device_limits(job.platform, job.devices),
        secrets=secrets,
        claim=claim,
        mount=mount,
    )
    if job.servers is not None:
        manifests = _server_groups(job, job.servers, pods)
    else:
        manifests = _server(pods, job) if job.launch.ready else [KINDS[kind].manifest(pods)]
    text = "---\n".join(dump_yaml(each, width=1000) for each in manifests)
    head = comments(job)
    if job.launch.sample:
        head.append(f"# Replace {shlex.join(job.launch.sample)}, which trains on generated data: {job.launch.missing}.")
    if job.servers is not None:
        program = shlex.join(job.servers.front.argv[:3])
        head.append(f"# The image must also have the router in front of the servers ({program} ...).")
    head += [f"# Create the secret {job.name}-secrets first."] if secrets else []
    return {f"{job.name}.yaml": "\n".join([*head, text])}


def _placeholders(hosts: Collection[str]) -> dict[str, str]:
    first = next(iter(hosts)) if len(hosts) > 1 else "127.0.0.1"
    return {"{nnodes}": str(len(hosts)), "{master_addr}": first, "{master_port}": str(MASTER_PORT)}


def _environment(job: ExportJob, hosts: Collection[str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the variables of all pods, and the secret of each secret variable. Each pod counts its devices from 0."""
    placeholders, ranks = _placeholders(hosts), dict[str, str]()
    if not job.launch.ready:
        ranks = {name.strip("{}").upper(): value for name, value in placeholders.items()}
        ranks |= {f"PET_{name}": value for name, value in ranks.items()} if len(hosts) > 1 else {}
    variables = {**ranks, **without_devices(job.platform.support, job.launch.environment)}
    secrets = {name: (f"{job.name}-secrets", name) for name in variables if is_secret(name)}
    return {name: _fill(value, placeholders) for name, value in variables.items() if name not in secrets}, secrets


def _command(job: ExportJob, hosts: Collection[str], of_host: Mapping[str, str]) -> str:
    """Return the shell command of a pod, in which `{rank}` is the number of the pod. The program is on the PATH of the
    image.

    `of_host` are the variables whose values differ between pods.
    """
    launch, placeholders = job.launch, _placeholders(hosts)
    argv = [os.path.basename(launch.argv[0]) if launch.ready else launch.argv[0], *launch.argv[1:], *launch.sample]
    if launch.ready:  # the service reaches the pod from outside
        argv = ["0.0.0.0" if word == urlsplit(launch.ready[0]).hostname else word for word in argv]
    words = " ".join(shell_quoted(_fill(word, placeholders), IN_SHELL) for word in argv)
    rank = "" if launch.ready else "export NODE_RANK={rank}; export PET_NODE_RANK=$NODE_RANK; "
    exports = "".join(f"export {name}={shell_quoted(value, IN_SHELL)}; " for name, value in of_host.items())
    return f"{rank}{exports}exec {words}"


def _server(pods: Pods, job: ExportJob) -> list[dict[str, Any]]:
    """Return a Deployment with one pod per server, and the Service in front of the pods."""
    health = urlsplit(job.launch.ready[0])
    labels, template = {"app": pods.name}, pod_template(pods, pods.first, "Always", "server")
    (container,) = template["spec"]["containers"]
    container["ports"] = [{"containerPort": health.port}]
    container["readinessProbe"] = {"httpGet": {"path": health.path, "port": health.port}, "periodSeconds": 5}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": pods.name},
        "spec": {
            "replicas": job.replicas,
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": labels}, **template},
        },
    }
    ports = [{"port": health.port, "targetPort": health.port}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": pods.name}}
    return [deployment, {**service, "spec": {"selector": dict(labels), "ports": ports}}]


def _server_groups(job: ExportJob, servers: ServerGroups, common: Pods) -> list[dict[str, Any]]:
    """Return a StatefulSet for each kind of server, and the router as in `_server`. A StatefulSet gives each pod a
    name.
    """
    manifests: list[dict[str, Any]] = []
    for group in servers.groups:
        own = replace(job, launch=group.launch, name=f"{job.name}-{group.name}", replicas=group.replicas)
        environment, _secrets = _environment(replace(own, name=job.name), ())
        addressed = {name: value.replace("{own_address}", "$(POD_IP)") for name, value in environment.items()}
        limits = device_limits(job.platform, group.devices)
        command = _command(own, (), {})
        pods = replace(common, name=own.name, first=command, environment=addressed, limits=limits)
        deployment, service = _server(pods, own)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        container["env"].insert(0, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        spec = {**deployment["spec"], "serviceName": own.name, "podManagementPolicy": "Parallel"}
        service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        manifests += [service, {**deployment, "kind": "StatefulSet", "spec": spec}]
    front = replace(job, launch=servers.front, replicas=1)
    command = _command(front, (), {})
    pods = replace(common, first=command, environment={}, limits={}, secrets={}, claim="", mount="")
    return [*manifests, *_server(pods, front)]


def _fill(text: str, placeholders: Mapping[str, str]) -> str:
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    return text


def manifest(
    platform: Platform, spec: Path, *, name: str, kind: str, image: str, volume: str, changes: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a job that tunes a spec, and notes: the first pod tunes, and the others join it."""
    claim, mount = claim_and_mount(volume)
    group, launcher = platform.task.cluster.groups[0], platform.task.spec.launcher
    limits, hosts = device_limits(platform, group.devices_per_node), KINDS[kind].hosts(name, group.nodes)
    if len(hosts) > 1 and launcher != "kubernetes":
        problem = _("does not start trials in pods")
        raise SpecError(key="auto_tuner.launcher", value=launcher, problem=problem, fix=_("set it to kubernetes"))
    pods = Pods(
        name=name,
        image=image,
        count=group.nodes,
        first=f"exec {shlex.join(['flag', 'tune', str(spec.resolve()), *changes])}",
        others=f"exec python3 -m flagcore_kubernetes.join {hosts[0]}",
        directory=str(Path.cwd()),
        environment={HOSTS: " ".join(hosts)},
        limits=limits,
        secrets={TOKEN: (f"{name}-token", "token")} if len(hosts) > 1 else {},
        claim=claim,
        mount=mount,
        first_ends=True,
    )
    secrets = {secret for secret, _key in pods.secrets.values()}
    return KINDS[kind].manifest(pods), [_("create the secret {name} first", name=secret) for secret in sorted(secrets)]
