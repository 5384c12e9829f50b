"""What the core asks of engines with optional contracts, and the answers for engines without them."""

from __future__ import annotations

from collections.abc import Sequence

from flagcore.contracts.platform import Costs
from flagcore.contracts.workload import (
    START_SECONDS,
    Breakdown,
    JobRecords,
    PipelineTimeline,
    Prober,
    SlowStart,
    StepLimit,
    UntestedEngine,
    Workload,
)
from flagcore.domain.prediction import Components, Labels, ModelPart
from flagcore.domain.space import Columns, IntArray
from flagcore.domain.spec import Task
from flagcore.errors import SpecError


def require_prober(workload: Workload) -> Prober:
    """Return `workload` as a Prober. Raises SpecError if it does not implement Prober."""
    if isinstance(workload, Prober):
        return workload
    raise _unsupported(workload, "probing", "use auto_tuner.control.fidelity: run or estimate, without probes")


def require_job_records(workload: Workload) -> JobRecords:
    """Return `workload` as JobRecords. Raises SpecError if it does not implement JobRecords."""
    if isinstance(workload, JobRecords):
        return workload
    raise _unsupported(workload, "job records", "write a spec for `flag estimate`")


def memory_components(workload: Workload, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
    """Return the result of `Breakdown.components`, empty for an engine without Breakdown."""
    return workload.components(task, columns, stages, costs) if isinstance(workload, Breakdown) else {}


def stage_layers(workload: Workload, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
    """Return the result of `PipelineTimeline.stage_layers`, empty for an engine without PipelineTimeline."""
    return workload.stage_layers(task, columns, costs) if isinstance(workload, PipelineTimeline) else ()


def model_parts(workload: Workload, task: Task) -> tuple[ModelPart, ...]:
    """Return the result of `Breakdown.parts`, empty for an engine without Breakdown."""
    return workload.parts(task) if isinstance(workload, Breakdown) else ()


def labels_of(workload: Workload) -> Labels:
    """Return `Breakdown.labels`, or empty Labels for an engine without Breakdown."""
    return workload.labels if isinstance(workload, Breakdown) else Labels()


def step_limit(workload: Workload, task: Task) -> int | None:
    """Return the result of `StepLimit.step_limit`, None for an engine without StepLimit."""
    return workload.step_limit(task) if isinstance(workload, StepLimit) else None


def untested_reason(workload: Workload) -> str:
    """Return `UntestedEngine.untested`, empty for an engine without it."""
    return workload.untested if isinstance(workload, UntestedEngine) else ""


def start_seconds(workload: Workload) -> float:
    """Return `SlowStart.start_seconds`, or START_SECONDS for an engine without SlowStart."""
    return workload.start_seconds if isinstance(workload, SlowStart) else START_SECONDS


def _unsupported(workload: Workload, what: str, fix: str) -> SpecError:
    return SpecError(key=f"{workload.kind}.engine", value=workload.name, problem=f"does not support {what}", fix=fix)
