"""vLLM as an engine of serving."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flagcore_serving.engine import ServingEngine
from flagcore_serving.model.work import Overheads
from flagcore_serving.space.knobs import TRANSFER
from flagcore_serving.space.settings import PublishedRuns

from flagcore.contracts import Costs
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, KnobValue
from flagcore.domain.spec import Task
from flagcore_vllm import rules, servers, space
from flagcore_vllm.cache import with_states


class Vllm(ServingEngine):
    """vLLM (`vllm serve`)."""

    name = "vllm"
    where = "flagcore_vllm:REPORTS"
    program = space.PROGRAM
    modules: Mapping[str, str] = {"vllm": "vllm>=0.11,<0.34"}
    host_address = "VLLM_HOST_IP"
    host_times = (2.0e-3, 0.28e-3)  # measured on 2 cores: 50 million parameters, 4 to 16 clients, 5 settings
    published_runs = PublishedRuns(
        cache_type="fp8",
        memory_flag="gpu-memory-utilization",
        release="0.17.0",
        engine_args={"gpt-oss": {"max-cudagraph-capture-size": 2048}},  # InferenceX @1b4c27d1 `gptoss_fp4_h100.sh`
    )

    merges = staticmethod(rules.merges)
    rules = staticmethod(rules.rules_of)
    settings = staticmethod(space.settings)
    server = staticmethod(servers.server)
    on_host = staticmethod(servers.on_host)
    of_kind = staticmethod(servers.of_kind)
    router = staticmethod(servers.router)

    def predict(self, task: Task, columns: Columns, costs: Costs, **how: Any) -> Predictions:
        """See `ServingEngine`. States have the types that vLLM gives them."""
        model = with_states(task.spec.model)
        if model is not task.spec.model:
            task = replace(task, spec=replace(task.spec, model=model))
        return super().predict(task, columns, costs, **how)

    def overheads_for(self, task: Task, **how: Any) -> Overheads:
        """See `ServingEngine`. gpt-oss has no chat template (`entrypoints/openai/serving_chat.py`: use_harmony)."""
        overheads = super().overheads_for(task, **how)
        return replace(overheads, entry=min(overheads.entry, 2e-3)) if "gpt-oss" in task.spec.model.name else overheads

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        return servers.PROTOCOLS[str(values.get(TRANSFER) or servers.NIXL)]


ENGINE = Vllm()
