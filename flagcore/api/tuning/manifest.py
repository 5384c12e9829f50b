"""Kubernetes manifests of a tuning job."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.api.common.context import load_snapshot
from flagcore.contracts import Platform
from flagcore.contracts.export import claim_and_mount, device_limits
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore.launchers.join import TOKEN
from flagcore.launchers.kubernetes import HOSTS
from flagcore.launchers.kubernetes import LAUNCHER as KUBERNETES
from flagcore.launchers.kubernetes_job import KINDS, Pods, checked_name, job_name


def manifest(
    where: Path | str,
    *,
    kind: str,
    image: str,
    name: str | None = None,
    volume: str | None = None,
    without: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a job that tunes a spec, and notes for the user.

    `kind` is one of `KINDS`. `volume` is CLAIM:PATH, a persistent volume claim and its mount point. All files must have
    the same paths in the image or on the volume. Raises the errors of `flagcore.errors`.
    """
    place = Path(where)
    if place.is_dir():
        raise UsageError(_("{run} is a run; `flag export {run} --to kubernetes` writes a job with its best", run=place))
    name = job_name(place.stem) if name is None else checked_name(name)
    claim, mount = claim_and_mount(volume or "")
    platform = load_snapshot(place, None, without).problem.platform
    group = platform.task.cluster.groups[0]
    limits, count = device_limits(platform, group.devices_per_node), group.nodes
    hosts = KINDS[kind].hosts(name, count)
    common = Pods(name=name, image=image, count=count, first="", others="", directory=str(Path.cwd()), limits=limits)
    common = replace(common, claim=claim, mount=mount)
    pods = _tuning_pods(common, place, hosts, platform)
    secrets = {secret for secret, _key in pods.secrets.values()}
    return KINDS[kind].manifest(pods), [_("create the secret {name} first", name=secret) for secret in sorted(secrets)]


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
