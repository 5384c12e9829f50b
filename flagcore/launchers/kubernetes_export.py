"""Exports a candidate to Kubernetes: a training job, or a Deployment with a Service."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from flagcore.contracts import ExportJob, ServerGroups
from flagcore.contracts.export import claim_and_mount, comments, device_limits
from flagcore.domain.secrets import is_secret
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.launchers.kubernetes_job import KINDS, Pods, pod_template
from flagcore.launchers.script import DEVICES_OF_HOST, MASTER_PORT, shell_quoted
from flagcore.spec.data_file import dump_yaml

ROUTER_FOLDER, ROUTER_FILE = "/router", "router.py"
IN_SHELL = {"{node_rank}": "NODE_RANK", **DEVICES_OF_HOST}
"""Variables and commands of a pod's shell for placeholders."""


def export(job: ExportJob) -> Mapping[str, str]:
    """Return the manifest of a job. Raises UsageError without an image, or for a server on several hosts."""
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
        manifests = _groups(job, job.servers, pods)
    else:
        manifests = _server(pods, job) if job.launch.ready else [KINDS[kind].manifest(pods)]
    text = "---\n".join(dump_yaml(each, width=1000) for each in manifests)
    head = comments(job)
    if job.launch.sample:
        head.append(f"# Replace {shlex.join(job.launch.sample)}, which trains on generated data: {job.launch.missing}.")
    head += [f"# Create the secret {job.name}-secrets first."] if secrets else []
    return {f"{job.name}.yaml": "\n".join([*head, text])}


def _placeholders(hosts: Collection[str]) -> dict[str, str]:
    first = next(iter(hosts)) if len(hosts) > 1 else "127.0.0.1"
    return {"{nnodes}": str(len(hosts)), "{master_addr}": first, "{master_port}": str(MASTER_PORT)}


def _environment(job: ExportJob, hosts: Collection[str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the variables of all pods, and the secrets by variable. A pod has devices of its own, counted from 0."""
    placeholders, ranks = _placeholders(hosts), dict[str, str]()
    if not job.launch.ready:
        ranks = {name.strip("{}").upper(): value for name, value in placeholders.items()}
        ranks |= {f"PET_{name}": value for name, value in ranks.items()} if len(hosts) > 1 else {}
    variables = {**ranks, **job.launch.environment}
    variables.pop(job.platform.support.visible_devices or "", None)
    secrets = {name: (f"{job.name}-secrets", name) for name in variables if is_secret(name)}
    return {name: _fill(value, placeholders) for name, value in variables.items() if name not in secrets}, secrets


def _command(job: ExportJob, hosts: Collection[str], of_host: Mapping[str, str]) -> str:
    """Return the shell command of a pod; `{rank}` is the number of the pod. The image has the program in its PATH.

    The values of the variables `of_host` are different in each pod.
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
    """Return a Deployment with a pod per server, and the Service in front of them."""
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


def _groups(job: ExportJob, servers: ServerGroups, common: Pods) -> list[dict[str, Any]]:
    """Return a StatefulSet for each kind of servers, which gives each a name, and the router as in `_server`."""
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
    words = " ".join(map(shlex.quote, (f"{ROUTER_FOLDER}/{ROUTER_FILE}", *servers.arguments)))
    pods = replace(common, first=f"exec python3 {words}", environment={}, limits={}, secrets={}, claim="", mount="")
    deployment, service = _server(pods, replace(job, replicas=1))
    template = deployment["spec"]["template"]["spec"]
    template["volumes"].append({"name": "router", "configMap": {"name": f"{job.name}-router"}})
    template["containers"][0]["volumeMounts"].append({"name": "router", "mountPath": ROUTER_FOLDER})
    program = {"metadata": {"name": f"{job.name}-router"}, "data": {ROUTER_FILE: servers.program}}
    return [*manifests, {"apiVersion": "v1", "kind": "ConfigMap", **program}, deployment, service]


def _fill(text: str, placeholders: Mapping[str, str]) -> str:
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    return text
