"""The files of autoscalers for the answer of `flag size`."""

import math
from collections.abc import Sequence
from typing import Any

from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.script import checked_name
from flagcore.plugins import find_engine
from flagcore.spec.plain_data import dump_yaml
from flagcore_serving.launch.reports import ServerReports
from flagcore_serving.sizing import Sizing
from flagcore_serving.space.hardware import INSTANCES, PREFILL_DECODE
from flagcore_serving.space.roles import roles

PLANNED = ("vllm", "sglang", "trtllm")
"""The engines that Dynamo's planner knows."""
AUTOSCALERS = ("hpa", "keda", "dynamo")
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
"""The address of the service that the Prometheus operator creates in the namespace `monitoring`."""


def manifest(found: Sizing, target: str, name: str) -> str:
    """Return the YAML of an autoscaler of the Deployment `name`: one of AUTOSCALERS.

    It keeps the replicas of the best size, between those of the calmest and of the busiest hour. Each instance of a
    replica is a pod, as in an export to Kubernetes. Sources: HorizontalPodAutoscaler of autoscaling/v2; ScaledObject of
    keda.sh/v1alpha1 with its Prometheus scaler; `PlannerConfig` of ai-dynamo 1.6.1. Raises UsageError.
    """
    best = found.best
    pods = int(best.candidate.get(INSTANCES) or 1)
    in_flight = max(1, math.floor(best.in_flight / pods))
    numbers = [pods * each for each in [each.replicas for each in found.hours] or [1, best.replicas]]
    about = f"# A replica: {best.configuration}; {best.rate:.3g} requests/s, with {in_flight} in flight per instance.\n"
    if target == "dynamo":
        return about + dump_yaml(_planner(found, numbers, best.devices_per_replica // pods))
    if best.candidate.get(PREFILL_DECODE) or best.nodes > pods:
        text = N_("{configuration}: a Deployment has identical servers on one host; use --to dynamo")
        raise UsageError(_(text, configuration=best.configuration))
    metrics = _metrics(found.engine)
    target_of = {"apiVersion": "apps/v1", "kind": "Deployment", "name": checked_name(name)}
    spec: dict[str, Any] = {"scaleTargetRef": target_of}
    if target == "hpa":
        about += "# An adapter, such as Prometheus Adapter, serves the metric of the pods.\n"
        average = {"type": "AverageValue", "averageValue": str(in_flight)}
        of_pod = {"metric": {"name": metrics[0].replace(":", "_")}, "target": average}
        spec |= {"minReplicas": min(numbers), "maxReplicas": max(numbers)}
        spec["metrics"] = [{"type": "Pods", "pods": of_pod}]
        version, kind = "autoscaling/v2", "HorizontalPodAutoscaler"
    else:
        of_pods = f'{{pod=~"{name}-.*"}}'
        query = " + ".join(f"sum({metric}{of_pods})" for metric in metrics)
        trigger = {"serverAddress": PROMETHEUS, "query": query, "threshold": str(in_flight)}
        spec |= {"minReplicaCount": min(numbers), "maxReplicaCount": max(numbers)}
        spec["triggers"] = [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}]
        version, kind = "keda.sh/v1alpha1", "ScaledObject"
    return about + dump_yaml({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})


def _planner(found: Sizing, numbers: Sequence[int], devices: int) -> dict[str, Any]:
    """Return the configuration of Dynamo's planner, whose limits are milliseconds. `devices`: those of an instance.
    Raises UsageError."""
    if found.engine not in PLANNED:
        raise UsageError(_("Dynamo's planner knows only {engines}", engines=", ".join(PLANNED)))
    limits = {"ttft_ms": found.slo.get("ttft_s"), "itl_ms": found.slo.get("itl_s") or found.slo.get("tpot_s")}
    kinds = roles(str(pair))[-2:] if (pair := found.best.candidate.get(PREFILL_DECODE)) else ()
    sizes: dict[str, int] = {} if kinds else {"decode_engine_num_gpu": devices}
    for kind, role in zip(("prefill", "decode"), kinds, strict=False):
        sizes |= {f"{kind}_engine_num_gpu": role.devices, f"{kind}_min_endpoint": min(numbers) * role.count}
    return {
        "mode": "disagg" if kinds else "agg",
        "backend": found.engine,
        "optimization_target": "sla",
        **{name: 1e3 * min(limit.values()) for name, limit in limits.items() if limit},
        "min_endpoint": min(numbers),
        "max_gpu_budget": max(numbers) * devices,
        **sizes,
        "model_name": found.model,
    }


def _metrics(engine: str) -> Sequence[str]:
    """Return the engine's metrics of running and of waiting requests. Raises UsageError."""
    reports: ServerReports | None = getattr(find_engine(engine), "reports", None)
    names = {meaning: name for name, meaning in reports.counters.items()} if reports else {}
    found = [names[each] for each in ("requests_running", "requests_waiting") if each in names]
    if not found:
        raise UsageError(_("{engine} reports no number of running requests", engine=engine))
    return found
