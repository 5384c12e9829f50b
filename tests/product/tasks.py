"""What `tests.tasks` has, for the engines of this repository: its tasks train with Megatron."""

from typing import Any

from flagcore_megatron.space.knobs import SPACE_KNOBS

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Task
from flagcore.plugins import engines
from tests import tasks
from tests.tasks import *  # noqa: F403

ENGINES: Any = engines()
ENGINES.data = {name: ENGINES[name] for name in ("megatron", "vllm", "sglang", "llamacpp", "lmdeploy")}
"""The engines of this repository."""
VENDORS = (
    *("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "enflame"),
    "thead",
)
PLAIN_SPACE = {
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "use_recompute": False,
}
"""The space of a spec that varies only DP, TP, PP and the micro-batch size."""


def task(*of: Any, **train: Any) -> Task:
    """A task on one node that trains with Megatron."""
    return tasks.task(*of, **{"engine": "megatron", **train})


def platform(task: Task, **changes: Any) -> Platform:
    """A platform without plugins' answers."""
    return tasks.platform(task, **{"engine": ENGINES[task.spec.work.engine], **changes})


def candidate(**values: KnobValue) -> Candidate:
    """A candidate of the megatron engine; knobs that are not given are neutral."""
    return Candidate.of({knob.name: values.get(knob.name, knob.neutral) for knob in SPACE_KNOBS})
