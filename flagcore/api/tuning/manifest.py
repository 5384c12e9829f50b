"""Kubernetes manifests of a tuning job, and of a training job with the best configuration of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.api.common.context import load_snapshot
from flagcore.api.tuning.export import DEVICES_OF_HOST, RENDEZVOUS, saved_launch, shell_quoted
from flagcore.api.tuning.kubernetes_job import KINDS, Pods
from flagcore.contracts import Platform
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.secrets import is_secret, secrets_in_arguments
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore.launchers.join import TOKEN
from flagcore.launchers.kubernetes import HOSTS
from flagcore.launchers.kubernetes import LAUNCHER as KUBERNETES

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Valid names of jobs. They are short, because the name of a pod is longer, and is a DNS label of at most 63
characters.
"""
IN_SHELL = {"{node_rank}": "NODE_RANK", **DEVICES_OF_HOST}
"""Variables and commands of a pod's shell for placeholders."""


def manifest(
    where: Path | str,
    *,
    kind: str,
    image: str,
    name: str | None = None,
    volume: str | None = None,
    without: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a job that tunes a spec, or that trains with the best of a run, and notes for the user.

    `kind` is one of `KINDS`. `volume` is CLAIM:PATH, a persistent volume claim and its mount point. All files must have
    the same paths in the image or on the volume. Raises the errors of `flagcore.errors`.
    """
    place = Path(where)
    name = name or _name(place.stem)
    claim, _separator, mount = (volume or "").partition(":")
    if not NAME.fullmatch(name):
        raise UsageError(_("--name = {name!r}: use at most 40 lower-case letters, digits and dashes", name=name))
    if volume is not None and not (claim and mount.startswith("/")):
        raise UsageError(_("--volume = {volume}: use CLAIM:PATH, such as data:/data", volume=volume))
    platform = load_snapshot(place, None, without).problem.platform
    limits, count = _limits(platform), platform.task.cluster.groups[0].nodes
    hosts = KINDS[kind].hosts(name, count)
    common = Pods(name=name, image=image, count=count, first="", others="", directory=str(Path.cwd()), limits=limits)
    common = replace(common, claim=claim, mount=mount)
    pods = _training_pods(common, place, hosts) if place.is_dir() else _tuning_pods(common, place, hosts, platform)
    secrets = {secret for secret, _key in pods.secrets.values()}
    return KINDS[kind].manifest(pods), [_("create the secret {name} first", name=secret) for secret in sorted(secrets)]


def _name(text: str) -> str:
    """Return a valid name of a job from a text."""
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", text.lower()))[:40].rstrip("-") or "flagcore"


def _limits(platform: Platform) -> Mapping[str, int]:
    """Return the device limits of a pod. Raises UsageError if no plugin has the name of the resource."""
    groups, support = platform.task.cluster.groups, platform.support
    if len(groups) > 1:
        raise UsageError(_("a job for several kinds of chips is not supported: all pods are equal"))
    group: NodeGroup = groups[0]
    if support.shared_devices:
        return {"cpu": group.devices_per_node}
    if support.kubernetes is None:
        raise UsageError(_("no installed plugin defines the Kubernetes resource of {chip}", chip=group.chip.name))
    each = group.chip.devices_per_card if support.kubernetes.counts == "cards" else 1
    return {support.kubernetes.name: -(-group.devices_per_node // each)}


def _tuning_pods(common: Pods, spec: Path, hosts: list[str], platform: Platform) -> Pods:
    """Return the pods of a tuning job: the first pod tunes, and the others join it."""
    launcher = platform.task.spec.launcher
    if len(hosts) > 1 and launcher != KUBERNETES.name:
        problem = _("does not start trials in pods")
        raise SpecError(key="auto_tuner.launcher", value=launcher, problem=problem, fix=_("set it to kubernetes"))
    return replace(
        common,
        first=f"exec flag tune {shlex.quote(str(spec.resolve()))}",
        others=f"exec python3 -m flagcore.launchers.join {hosts[0]}",
        environment={HOSTS: " ".join(hosts)},
        secrets={TOKEN: (f"{common.name}-token", "token")} if len(hosts) > 1 else {},
        first_ends=True,
    )


def _training_pods(common: Pods, run: Path, hosts: list[str]) -> Pods:
    """Return the pods of a training job: each runs the command of the best, with its own rank. Raises UsageError."""
    launch = saved_launch(run)
    if launch["ready"]:
        raise UsageError(_("the best of {run} is a server; only training jobs are supported", run=run))
    if launch["missing"]:
        text = _("the command of the best of {run} lacks {missing}; set a complete train.command", run=run, **launch)
        raise UsageError(text)
    if secrets_in_arguments(launch["argv"]):
        raise UsageError(_("the command of the best of {run} contains a secret; pass it in a variable", run=run))
    port, count = RENDEZVOUS["MASTER_PORT"], str(len(hosts))
    first = hosts[0] if len(hosts) > 1 else RENDEZVOUS["MASTER_ADDR"]
    rank_variables = {"NNODES": count, "MASTER_ADDR": first, "MASTER_PORT": port}
    torchrun = {f"PET_{name}": value for name, value in rank_variables.items()} if len(hosts) > 1 else {}
    environment = {**rank_variables, **torchrun, **launch["environment"]}
    placeholders = {"{nnodes}": count, "{master_addr}": first, "{master_port}": port}
    environment = {name: _fill_placeholders(value, placeholders) for name, value in environment.items()}
    words = (shell_quoted(_fill_placeholders(word, placeholders), IN_SHELL) for word in launch["argv"])
    secret_names = [*launch["needs"], *(name for name in environment if is_secret(name))]
    public = {name: value for name, value in environment.items() if name not in secret_names}
    of_host = [name for name, value in public.items() if any(each in value for each in IN_SHELL)]
    exports = (f"export {name}={shell_quoted(public[name], IN_SHELL)}; " for name in of_host)
    ranks = "export NODE_RANK={rank}; export PET_NODE_RANK=$NODE_RANK"
    command = f"{ranks}; {''.join(exports)}exec {' '.join(words)}"
    return replace(
        common,
        first=command,
        others=command,
        directory=str(launch["directory"]),
        environment={name: value for name, value in public.items() if name not in of_host},
        secrets={name: (f"{common.name}-secrets", name) for name in secret_names},
    )


def _fill_placeholders(text: str, fixed: Mapping[str, str]) -> str:
    for placeholder, value in fixed.items():
        text = text.replace(placeholder, value)
    return text
