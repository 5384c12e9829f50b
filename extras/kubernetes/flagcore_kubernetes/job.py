"""Manifests: a job that tunes a spec, a job that trains with a candidate, or a Deployment with a Service.

A job is a JobSet, a PyTorchJob or Volcano's Job, with a first pod and others. The fields are from JobSet
jobset.x-k8s.io/v1alpha2, PyTorchJob kubeflow.org/v1 (training-operator 1.9), Job batch.volcano.sh/v1alpha1,
LeaderWorkerSet leaderworkerset.x-k8s.io/v1. Each kind gives every pod a stable name, by which the other pods reach it.
"""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flagcore_hosts.job import no_checkpoints

from flagcore.contracts import ExportJob, Platform
from flagcore.contracts.exchange import DEVICES_OF_HOST, comments, shell_quoted
from flagcore.domain.engine import without_devices
from flagcore.domain.launch import ServerGroup, ServerGroups
from flagcore.domain.secrets import is_secret
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.network import replaced
from flagcore.launchers.script import MASTER_PORT
from flagcore.spec.plain_data import dump_yaml
from flagcore_kubernetes.join import TOKEN
from flagcore_kubernetes.pods import Pods, device_limits, pod_options, pod_spec, rdma_note

HOSTS = "FLAGCORE_HOSTS"
"""Environment variable that contains the names of the job's pods, the tuning pod first."""
FIRST, OTHERS = "first", "others"
START_SECONDS = 1200
"""How long a server may take to start, before its pod is restarted: as a trial of servers by default."""
HUB_SECRET = "hf-token"
"""The secret with HF_TOKEN for weights that a server downloads. It may be missing."""
KEPT_SECONDS = 7 * 24 * 3600
"""How long a finished job is kept, with its logs."""


def _groups(pods: Pods, first_rank: str, other_rank: str) -> list[tuple[str, int, str]]:
    """Return the name, the number of pods and the command of each group of pods."""
    groups = [(FIRST, 1, pods.first.replace("{rank}", first_rank))]
    return groups + [(OTHERS, pods.count - 1, pods.others.replace("{rank}", other_rank))] * (pods.count > 1)


def _final_codes(pods: Pods) -> list[int]:
    """Return the exit codes after which another start would end in the same way: a wrong command or no such program,
    and those of `flag tune` for a wrong spec, no fitting candidate, no device, or only failed trials."""
    return [2, 3, 4, 5, 126, 127] if pods.tunes else [2, 126, 127]


def _jobset(pods: Pods) -> dict[str, Any]:
    def job(name: str, count: int, command: str) -> dict[str, Any]:
        joins = name == OTHERS and pods.tunes
        exits = {"containerName": "flagcore", "operator": "In", "values": _final_codes(pods)}
        never = {"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exits}]}}
        spec = {"parallelism": count, "completions": count, "completionMode": "Indexed"}
        spec |= {"backoffLimit": pods.restarts} if joins else {"backoffLimit": 0, **never}  # else all pods start again
        template = {"spec": pod_spec(pods, command, "OnFailure" if joins else "Never")}
        return {"name": name, "replicas": 1, "template": {"spec": {**spec, "template": template}}}

    jobs = [job(*group) for group in _groups(pods, "0", "$((JOB_COMPLETION_INDEX + 1))")]
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    success_policy = {"successPolicy": {"operator": "All", "targetReplicatedJobs": [FIRST]}} if pods.tunes else {}
    policies = {"failurePolicy": {"maxRestarts": pods.restarts, "rules": [final]}, **success_policy}
    spec = {**policies, "ttlSecondsAfterFinished": KEPT_SECONDS, "replicatedJobs": jobs}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": pods.metadata, "spec": spec}


def _pytorch(pods: Pods) -> dict[str, Any]:
    names, replicas = {FIRST: "Master", OTHERS: "Worker"}, dict[str, Any]()
    for name, count, command in _groups(pods, "$RANK", "$RANK"):
        # ExitCode: only after a code of at least 128, which means that a signal ended the pod
        restart = "ExitCode" if name == FIRST and pods.tunes else "OnFailure"
        spec = pod_spec(pods, command, restart, "pytorch")
        del spec["restartPolicy"]  # a PyTorchJob uses the policy of the replica
        replicas[names[name]] = {"replicas": count, "restartPolicy": restart, "template": {"spec": spec}}
    policy = {
        "backoffLimit": pods.restarts,
        "cleanPodPolicy": "All" if pods.tunes else "None",
        "schedulingPolicy": {"minAvailable": pods.count},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": pods.metadata, "spec": spec}


def _volcano(pods: Pods) -> dict[str, Any]:
    def task(name: str, count: int, command: str) -> dict[str, Any]:
        joins = name == OTHERS and pods.tunes
        policies: list[dict[str, Any]] = (
            [] if joins else [{"exitCode": code, "action": "AbortJob"} for code in _final_codes(pods)]
        )
        if name == FIRST and pods.tunes:
            policies.append({"event": "TaskCompleted", "action": "CompleteJob"})
        template = {"spec": pod_spec(pods, command, "OnFailure" if joins else "Never")}
        return {"name": name, "replicas": count, **({"policies": policies} if policies else {}), "template": template}

    spec = {
        "schedulerName": "volcano",
        **({"queue": pods.queue} if pods.queue else {}),
        "minAvailable": pods.count,
        "maxRetry": pods.restarts,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "plugins": {"svc": [], "env": []},
        "policies": [{"event": event, "action": "RestartJob"} for event in ("PodEvicted", "PodFailed")],
        "tasks": [task(*group) for group in _groups(pods, "0", "$((VC_TASK_INDEX + 1))")],
    }
    return {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": pods.name}, "spec": spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job: a function that returns its manifest, and the host names of its first pod and of the others."""

    manifest: Callable[[Pods], dict[str, Any]]
    first: str
    others: str

    def hosts(self, name: str, count: int) -> list[str]:
        """Return the host names of the pods in order."""
        others = [self.others.format(name=name, number=number) for number in range(count - 1)]
        return [self.first.format(name=name), *others]


KINDS = {
    "jobset": Kind(manifest=_jobset, first="{name}-first-0-0.{name}", others="{name}-others-0-{number}.{name}"),
    "pytorchjob": Kind(manifest=_pytorch, first="{name}-master-0", others="{name}-worker-{number}"),
    "volcano": Kind(manifest=_volcano, first="{name}-first-0.{name}", others="{name}-others-{number}.{name}"),
}


IN_SHELL = {"{node_rank}": "NODE_RANK", **DEVICES_OF_HOST}
"""Maps placeholders to variables and commands in the shell of a pod."""
IN_GROUP = {"{node_rank}": "LWS_WORKER_INDEX", "{own_address}": "LWS_LEADER_ADDRESS"}
"""Maps placeholders to the variables that LeaderWorkerSet sets: the number of a pod, and the name of the first one."""
ROLE, LEADER = "role", "leader"
"""The label by which a Service selects the pods that accept requests."""


def export(job: ExportJob) -> Mapping[str, str]:
    """Return the manifest of a job. Raises UsageError if an option is missing or invalid."""
    kind = job.options.get("kind", "jobset")
    if job.is_server and "kind" in job.options:
        raise UsageError(_("--kind is for training: servers are a Deployment, StatefulSets or LeaderWorkerSets"))
    image = job.options.get("image", job.image)
    if not image:
        raise UsageError(_("--to kubernetes needs --image, an image with the program of the candidate"))
    hosts = KINDS[kind].hosts(job.name, job.nodes)
    environment, of_host, secrets = _environment(job, hosts)
    command = "" if job.servers is not None else _command(job, hosts, of_host)
    pods = Pods(
        name=job.name,
        count=job.nodes,
        first=command,
        others=command,
        directory=job.launch.directory or "",
        environment=environment,
        limits=device_limits(job.platform, job.devices, job.options),
        devices=job.devices,
        secrets=secrets,
        **pod_options({**job.options, "image": image}),
    )
    if job.servers is not None:
        manifests = _server_groups(job, job.servers, pods)
    else:
        manifests = _server(pods, job) if job.launch.ready else [KINDS[kind].manifest(pods)]
    text = "---\n".join(dump_yaml(each, width=1000) for each in manifests)
    return {f"{job.name}.yaml": "\n".join([*comments(job), *_notes(job, pods), text])}


def _notes(job: ExportJob, pods: Pods) -> list[str]:
    """Return comments for the user: what to replace, and what must exist in the cluster and the image."""
    notes, servers = list[str](), job.servers
    weights = [job.platform.task.spec.serve.weights or ""] if job.is_server else []
    hosts = max(group.hosts for group in servers.groups) if servers else job.nodes
    if job.launch.sample:
        notes.append(f"Replace {shlex.join(job.launch.sample)}, which trains on generated data: {job.launch.missing}.")
    if job.options.get("restarts") and (note := no_checkpoints(job.launch)):
        notes.append(f"{note[0].upper()}{note[1:]}.")
    if servers and servers.front:
        program = shlex.join(servers.front.argv[:3])
        notes.append(f"The image must also have the router in front of the servers ({program} ...).")
    if servers and hosts > 1:
        notes.append("The cluster must have LeaderWorkerSet, which starts each server on several hosts.")
    if any(not os.path.isabs(each) for each in weights):
        notes.append(f"For weights that need a token, create the secret {HUB_SECRET} with HF_TOKEN.")
    if pods.secrets:
        notes.append(f"Create the secret {job.name}-secrets first.")
    paths = dict.fromkeys(weights or [job.launch.directory or "", *job.launch.argv])
    on_volume = [each for each in paths if pods.claim and Path(each).is_relative_to(pods.mount)]
    if needed := [each for each in paths if os.path.isabs(each) and each not in on_volume]:
        notes.append(f"The image must have {', '.join(needed)}; --volume CLAIM:PATH mounts a volume.")
    notes += [f"{note[0].upper()}{note[1:]}." for note in rdma_note(job.platform, hosts, pods)]
    if not pods.user:
        notes.append("For a namespace with the Pod Security Standard restricted, add --user NUMBER.")
    return [f"# {note}" for note in notes]


def _placeholders(hosts: Collection[str]) -> dict[str, str]:
    first = next(iter(hosts)) if len(hosts) > 1 else "127.0.0.1"
    return {"{nnodes}": str(len(hosts)), "{master_addr}": first, "{master_port}": str(MASTER_PORT)}


def _environment(job: ExportJob, hosts: Collection[str]) -> tuple[dict[str, str], str, dict[str, tuple[str, str]]]:
    """Return the variables of all pods, shell commands that set those of each host, and the secret of each secret one.

    Each pod counts its devices from 0.
    """
    placeholders, ranks = _placeholders(hosts), dict[str, str]()
    if not job.launch.ready:
        ranks = {name.strip("{}").upper(): value for name, value in placeholders.items()}
        ranks |= {f"PET_{name}": value for name, value in ranks.items()} if len(hosts) > 1 else {}
    variables = {**ranks, **without_devices(job.platform.support, job.launch.environment)}
    secrets = {name: (f"{job.name}-secrets", name) for name, value in variables.items() if is_secret(name, value)}
    plain = {name: replaced(value, placeholders) for name, value in variables.items() if name not in secrets}
    of_host = [name for name, value in plain.items() if any(each in value for each in IN_SHELL)]
    exports = "".join(f"export {name}={shell_quoted(plain.pop(name), IN_SHELL)}; " for name in of_host)
    return plain, exports, secrets


def _command(job: ExportJob, hosts: Collection[str], of_host: str = "") -> str:
    """Return the shell command of a pod, in which `{rank}` is the number of the pod. The program is on the PATH of the
    image.

    `of_host`: shell commands before it, as in `_environment`.
    """
    launch, placeholders = job.launch, _placeholders(hosts)
    argv = [*launch.argv, *launch.sample]
    if launch.ready:  # the service reaches the pod from outside
        argv = ["0.0.0.0" if word == urlsplit(launch.ready[0]).hostname else word for word in argv]
    names = {**IN_SHELL, **IN_GROUP} if launch.ready else IN_SHELL
    words = " ".join(shell_quoted(replaced(word, placeholders), names) for word in argv)
    rank = "" if launch.ready else "export NODE_RANK={rank}; export PET_NODE_RANK=$NODE_RANK; "
    return f"{rank}{of_host}exec {words}"


def _server(pods: Pods, job: ExportJob) -> list[dict[str, Any]]:
    """Return a Deployment with one pod per server, and the Service in front of the pods."""
    labels, template = {"app": pods.name}, {"spec": _server_pod(pods, job)}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pods.metadata,
        "spec": {
            "replicas": job.replicas,
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, **template},
        },
    }
    return [deployment, _service(pods.name, labels, job)]


def _server_pod(pods: Pods, job: ExportJob) -> dict[str, Any]:
    """Return the spec of a pod with a server that is ready when its health check succeeds."""
    health, spec = urlsplit(job.launch.ready[0]), pod_spec(pods, pods.first, "Always", "server")
    check = {"path": health.path, "port": health.port}
    _add_hub(spec, pods, job)
    spec["containers"][0] |= {
        "ports": [{"containerPort": health.port}],
        "startupProbe": {"httpGet": check, "periodSeconds": 10, "failureThreshold": START_SECONDS // 10},
        "readinessProbe": {"httpGet": dict(check), "periodSeconds": 5},
    }
    return spec


def _add_hub(spec: dict[str, Any], pods: Pods, job: ExportJob) -> None:
    """Let a server download weights that are a name: with the token, if there is a secret, into a folder that stays."""
    weights, container = job.platform.task.spec.serve.weights or "", spec["containers"][0]
    if not weights or os.path.isabs(weights) or not pods.devices:  # the router needs none
        return
    given = {each["name"] for each in container.setdefault("env", [])}
    token = {"secretKeyRef": {"name": HUB_SECRET, "key": "HF_TOKEN", "optional": True}}
    home = f"{pods.mount or '/hub'}/huggingface"
    variables: list[dict[str, Any]] = [{"name": "HF_TOKEN", "valueFrom": token}, {"name": "HF_HOME", "value": home}]
    container["env"] += [each for each in variables if each["name"] not in given]
    if not pods.claim:
        spec.setdefault("volumes", []).append({"name": "hub", "emptyDir": {}})
        container.setdefault("volumeMounts", []).append({"name": "hub", "mountPath": "/hub"})


def _service(name: str, labels: Mapping[str, str], job: ExportJob) -> dict[str, Any]:
    port = urlsplit(job.launch.ready[0]).port
    spec = {"selector": dict(labels), "ports": [{"port": port, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


ROUTER_LIMITS: Mapping[str, int | str] = {"cpu": 2, "memory": "4Gi"}
"""The limits of the pod of a router, which computes nothing. Chosen by hand, for clusters that demand limits."""


def _server_groups(job: ExportJob, servers: ServerGroups, common: Pods) -> list[dict[str, Any]]:
    """Return a StatefulSet for each kind of server, and the router as in `_server`. A StatefulSet gives each pod a
    name.

    Servers on several hosts are a LeaderWorkerSet, whose first pods have the same names.
    """
    manifests: list[dict[str, Any]] = []
    for group in servers.groups:
        own = replace(job, launch=group.launch, name=f"{job.name}-{group.name}", replicas=group.replicas)
        environment, of_host, _secrets = _environment(replace(own, name=job.name), ())
        addressed = {name: value.replace("{own_address}", "$(POD_IP)") for name, value in environment.items()}
        limits = device_limits(job.platform, group.devices, job.options)
        others = " ".join(shell_quoted(word, IN_GROUP) for word in group.others)
        pods = replace(common, name=own.name, first=_command(own, (), of_host), others=f"{of_host}exec {others}")
        pods = replace(pods, environment=addressed, limits=limits, devices=group.devices)
        if group.hosts > 1:
            manifests.append(_on_hosts(pods, own, group))
            if servers.front is None:
                manifests.append(_service(job.name, {"app": own.name, ROLE: LEADER}, own))
            continue
        deployment, service = _server(pods, own)
        _add_address(deployment["spec"]["template"]["spec"])
        spec = {**deployment["spec"], "serviceName": own.name, "podManagementPolicy": "Parallel"}
        service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        manifests += [service, {**deployment, "kind": "StatefulSet", "spec": spec}]
    if servers.front is None:
        return manifests
    front = replace(job, launch=servers.front, replicas=1)
    changes = {name: value for name, value in common.changes.items() if name != "containers"}  # it needs no devices
    router = replace(common, first=_command(front, ()), changes=changes, limits=ROUTER_LIMITS, devices=0)
    router = replace(router, environment={}, secrets={}, rdma="", claim="", mount="")
    return [*manifests, *_server(router, front)]


def _on_hosts(pods: Pods, job: ExportJob, group: ServerGroup) -> dict[str, Any]:
    """Return the LeaderWorkerSet of servers on several hosts. It creates a Service with its own name."""
    leader, worker = _server_pod(pods, job), pod_spec(pods, pods.others, "Always", "server")
    _add_hub(worker, pods, job)
    for spec in (leader, worker):
        _add_address(spec)
    template = {
        "size": group.hosts,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {"metadata": {"labels": {"app": pods.name, ROLE: LEADER}}, "spec": leader},
        "workerTemplate": {"metadata": {"labels": {"app": pods.name}}, "spec": worker},
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": pods.metadata,
        "spec": {"replicas": group.replicas, "leaderWorkerTemplate": template},
    }


def _add_address(spec: dict[str, Any]) -> None:
    """Add the variable with the address of the pod, to which other variables may refer."""
    variable = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    spec["containers"][0].setdefault("env", []).insert(0, variable)


def manifest(
    platform: Platform, spec: Path, *, name: str, options: Mapping[str, str], changes: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a job that tunes a spec, and notes: the first pod tunes, and the others join it."""
    group, launcher, kind = platform.task.cluster.groups[0], platform.task.spec.launcher, KINDS[options["kind"]]
    limits, hosts = device_limits(platform, group.devices_per_node, options), kind.hosts(name, group.nodes)
    if len(hosts) > 1 and launcher != "kubernetes":
        problem = _("does not start trials in pods")
        raise SpecError(key="auto_tuner.launcher", value=launcher, problem=problem, fix=_("set it to kubernetes"))
    pods = Pods(
        name=name,
        count=group.nodes,
        first=f"exec {shlex.join(['flag', 'tune', str(spec.resolve()), *changes])}",
        others=f"exec python3 -m flagcore_kubernetes.join {hosts[0]}",
        directory=str(Path.cwd()),
        environment={HOSTS: " ".join(hosts)},
        limits=limits,
        devices=group.devices_per_node,
        secrets={TOKEN: (f"{name}-token", "token")} if len(hosts) > 1 else {},
        tunes=True,
        **pod_options(options),
    )
    secrets = {secret for secret, _key in pods.secrets.values()}
    notes = [_("create the secret {name} first", name=secret) for secret in sorted(secrets)]
    notes = [*notes, *rdma_note(platform, group.nodes, pods)]
    return kind.manifest(pods), [*notes, *_storage_notes(pods, spec.resolve())]


def _storage_notes(pods: Pods, spec: Path) -> list[str]:
    """Return notes on a spec that the image must have, and on a run that is lost with its pod.

    Raises UsageError if there is a volume, but the run is not on it.
    """
    if not pods.claim:
        return [_("the run is lost when its pod ends: add --volume CLAIM:PATH")]
    if not Path(pods.directory).is_relative_to(pods.mount):
        text = N_(
            "--volume: the run would be in {folder}, which is not on {mount}; start this command in a folder there"
        )
        raise UsageError(_(text, folder=pods.directory, mount=pods.mount))
    text = N_("{spec} is not on the volume {mount}: the image must have it")
    return [] if spec.is_relative_to(pods.mount) else [_(text, spec=spec, mount=pods.mount)]
