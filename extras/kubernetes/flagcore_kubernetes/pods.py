"""The pods of manifests: what the user's options, the namespace and the devices require of each of them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagcore.contracts import Platform
from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import read_mapping

SHM_GIB_PER_DEVICE = 8
"""The limit of /dev/shm in GiB per device: an assumption. Data loaders and collectives rarely use more."""
RESTARTS = 3
"""How often a job is started again, unless the user says."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""With `--user`, a container fulfills the Pod Security Standard `restricted`, together with the pod's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a job. `first` and `others` are shell commands, in which `{rank}` is the number of the pod.

    `limits` are the resources of each pod. `secrets` maps variables to the name and key of their secret. `claim` is a
    persistent volume claim, mounted at `mount`; it is empty if there is none. `devices` is the number of devices of a
    pod. `queue` is the name of a queue, and `user` the number of the user of the processes; both may be empty.
    `rdma` is the resource of network adapters; it is empty if the pods request none.
    `restarts`: how often the job is started again, for example after a preemption.
    `changes` are fields that are merged into the spec of each pod. With `tunes`, the first pod runs `flag tune`: the
    job ends when it ends, otherwise when all pods have ended.
    """

    name: str
    image: str
    count: int = 1
    first: str
    others: str = ""
    directory: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int | str] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    claim: str = ""
    mount: str = ""
    devices: int = 0
    queue: str = ""
    user: str = ""
    rdma: str = ""
    restarts: int = RESTARTS
    changes: Mapping[str, Any] = field(default_factory=dict)
    tunes: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the job or the server, with its name and the label of its queue."""
        return {"name": self.name, **({"labels": {QUEUE_LABEL: self.queue}} if self.queue else {})}


def claim_and_mount(volume: str) -> tuple[str, str]:
    """Return the claim and the mount point in the value of `--volume`.

    Both are empty if `volume` is empty. Raises UsageError if `volume` is not of the form CLAIM:PATH.
    """
    claim, _separator, mount = volume.partition(":")
    if volume and not (claim and mount.startswith("/")):
        raise UsageError(_("--volume = {volume}: use CLAIM:PATH, such as data:/data", volume=volume))
    return claim, mount


def device_limits(platform: Platform, devices: int, options: Mapping[str, str]) -> Mapping[str, int]:
    """Return the resource limits of a pod with this number of `devices`. The option `resource` replaces their name.

    Raises UsageError if no plugin defines the Kubernetes resource, or if there are several kinds of chips.
    """
    groups, support = platform.task.cluster.groups, platform.support
    if len(groups) > 1:
        raise UsageError(_("a job for several kinds of chips is not supported: all its pods request the same devices"))
    group = groups[0]
    if support.shared_devices:
        return {"cpu": devices}
    resource = support.kubernetes
    if not (name := options.get("resource", resource.name if resource else "")):
        text = N_("no installed plugin defines the Kubernetes resource of {chip}: add --resource NAME")
        raise UsageError(_(text, chip=group.chip.name))
    devices_per_unit = group.chip.devices_per_card if resource and resource.counts == "cards" else 1
    return {name: -(-devices // devices_per_unit)}


def rdma_note(platform: Platform, nodes: int, pods: Pods) -> list[str]:
    """Return a note on the option `--rdma` for pods on several nodes whose vendor has such a resource."""
    kubernetes = platform.support.kubernetes
    if nodes == 1 or pods.rdma or not (kubernetes and kubernetes.rdma):
        return []
    text = N_(
        "pods request no network adapters; for RDMA, add --rdma with the resource of your cluster, such as {name}"
    )
    return [_(text, name=kubernetes.rdma.name)]


def pod_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of Pods that the user's options set. Raises UsageError for an invalid option."""
    claim, mount = claim_and_mount(options.get("volume", ""))
    user, file = options.get("user", ""), options.get("pods", "")
    if user and not (user.isdecimal() and 0 < int(user) < 2**31):
        raise UsageError(_("--user = {user}: use the number of a user other than root, such as 1000", user=user))
    changes = read_mapping(Path(file), file=file, key="--pods") if file else {}
    return {
        "claim": claim,
        "mount": mount,
        "queue": options.get("queue", ""),
        "user": user,
        "rdma": options.get("rdma", ""),
        "restarts": int(options.get("restarts", RESTARTS)),
        "changes": changes,
        "image": options["image"],
    }


def pod_spec(pods: Pods, command: str, restart: str, container: str = "flagcore") -> dict[str, Any]:
    """Return the spec of a pod that runs a shell command.

    If the pod has devices, it mounts /dev/shm, through which they exchange data: the default is only 64 MB. It has no
    token of a service account, and no variables of other services, such as VLLM_PORT of a service named vllm.
    """
    own = {"HOME": "/tmp", "USER": "user"} if pods.user else {}  # images rarely have an entry for the number
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in {**own, **pods.environment}.items()
    ]
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}}
        for name, (where, key) in pods.secrets.items()
    ]
    volumes, mounts = list[dict[str, Any]](), list[dict[str, Any]]()
    if pods.devices:
        limit = {"medium": "Memory", "sizeLimit": f"{SHM_GIB_PER_DEVICE * pods.devices}Gi"}
        volumes.append({"name": "shm", "emptyDir": limit})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if pods.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "data", "mountPath": pods.mount})
    limits: dict[str, int | str] = {**pods.limits, **({pods.rdma: 1} if pods.rdma else {})}
    locks = {"capabilities": {"add": ["IPC_LOCK"]}} if pods.rdma else {}  # RDMA locks memory
    one = {
        "name": container,
        "image": pods.image,
        "command": ["sh", "-c", command.replace("$$", "$$$$")],  # Kubernetes reads $$ as $
        "workingDir": pods.directory,
        "env": variables,
        "resources": {"limits": limits} if limits else {},
        "volumeMounts": mounts,
        "securityContext": RESTRICTED if pods.user else {"allowPrivilegeEscalation": False, **locks},
    }
    spec = {
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _context(int(pods.user)) if pods.user else {},
        "containers": [{name: value for name, value in one.items() if value}],
        "volumes": volumes,
    }
    result: dict[str, Any] = merged({name: each for name, each in spec.items() if each not in ({}, [])}, pods.changes)
    return deepcopy(result)


def _context(user: int) -> dict[str, Any]:
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def merged(spec: Any, changes: Any) -> Any:
    """Return `spec` with `changes`: mappings are merged, containers one by one, and other lists are joined.

    Items of lists with the same name, or mounts with the same path, are merged.
    """
    if isinstance(spec, dict) and isinstance(changes, dict):
        result = dict(spec)
        for key, value in changes.items():
            if key == "containers" and isinstance(value, list) and key in spec:
                pairs = zip(spec[key], value, strict=False)
                result[key] = [merged(*pair) for pair in pairs] + value[len(spec[key]) :]
            else:
                result[key] = merged(spec[key], value) if key in spec else value
        return result
    if not (isinstance(spec, list) and isinstance(changes, list)):
        return changes
    given = {_identity(each): each for each in changes}
    kept = [merged(each, given[_identity(each)]) if _identity(each) in given else each for each in spec]
    return kept + [each for each in changes if _identity(each) not in map(_identity, spec)]


def _identity(item: Any) -> str:
    """Return the path of a mount, the name of another named item, or the text of any other item."""
    return str(item.get("mountPath") or item.get("name") or item) if isinstance(item, dict) else str(item)
