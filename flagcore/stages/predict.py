"""predict: memory and time of the whole space, a chunk of columns at a time."""

from __future__ import annotations

from flagcore.contracts import Costs, Workload
from flagcore.domain.prediction import Prediction, Predictions
from flagcore.domain.space import Space
from flagcore.domain.spec import Task

CHUNK = 1 << 16
GIB = 2**30


def predict(task: Task, workload: Workload, space: Space, costs: Costs) -> Predictions:
    """Return the predictions of all candidates, in the order of the space's rows."""
    chunks = [workload.predict(task, space.columns(rows), costs) for rows in space.chunks(CHUNK)]
    return Predictions.join(chunks or [workload.predict(task, space.columns(), costs)])


def record(task: Task, prediction: Prediction) -> dict[str, object]:
    """Return a prediction as plain data in the format of job records: GiB, seconds; unknown figures are left out."""
    data: dict[str, object] = {}
    chip, devices, train = task.cluster.groups[0].chip, task.cluster.devices, task.spec.train
    seconds, low, high = prediction.step_time_s, prediction.low_s, prediction.high_s
    if seconds is not None and low is not None and high is not None:
        tokens = train.global_batch_size * train.seq_length / devices
        data["step_time_s"] = {"value": seconds, "low": low, "high": high}
        data["tokens_per_second_per_device"] = {"value": tokens / seconds, "low": tokens / high, "high": tokens / low}
        rate = prediction.model_flops / seconds / devices
        data["model_tflops_per_device"] = rate / 1e12
        peak = chip.dense_flops_per_second.get(train.precision)
        if peak:
            data["mfu"] = rate / peak.value
        data["time"] = dict(prediction.time_s)
    memory: dict[str, object] = {
        "static_gib": prediction.static_bytes / GIB,
        "activation_gib": prediction.activation_bytes / GIB,
        "peak_allocated_gib": prediction.peak_allocated_bytes / GIB,
        "reserved_gib": prediction.reserved_bytes / GIB,
        "device_used_gib": prediction.device_used_bytes / GIB,
        "worst_stage": prediction.worst_stage,
    }
    if prediction.capacity_bytes is not None:
        memory = {"fits": prediction.fits, "capacity_gib": prediction.capacity_bytes / GIB, **memory}
    if prediction.components:
        memory["components"] = {
            name: {
                key.replace("_bytes", "_gib"): figure / GIB if key.endswith("_bytes") else figure
                for key, figure in part.items()
            }
            for name, part in prediction.components.items()
        }
    data["memory"] = memory
    return data
