"""vLLM as an engine of serving."""

from collections.abc import Mapping

from flagcore_serving.engine import ServingEngine
from flagcore_serving.launch.server import Instance, Router
from flagcore_serving.space.knobs import TRANSFER
from flagcore_serving.space.settings import PublishedRuns, Settings

from flagcore.domain.space import Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore_vllm import rules, servers, space


class Vllm(ServingEngine):
    """vLLM (`vllm serve`)."""

    name = "vllm"
    where = "flagcore_vllm:REPORTS"
    program = space.PROGRAM
    modules: Mapping[str, str] = {"vllm": "vllm>=0.11,<0.34"}
    plans_by_default = True
    host_address = "VLLM_HOST_IP"
    host_times = (2.0e-3, 0.28e-3)  # measured on 2 cores: 50 million parameters, 4 to 16 clients, 5 settings
    published_runs = PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0")

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return rules.rules_of(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return rules.merges(task)

    def settings(self, task: Task, columns: Columns) -> Settings:
        return space.settings(task, columns)

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        return servers.server(task, values, cores)

    def on_host(self, hosts: int, rank: str) -> tuple[str, ...]:
        return servers.on_host(hosts, rank)

    def of_kind(self, task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
        return servers.of_kind(task, values, kind, instance)

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        return servers.PROTOCOLS[str(values.get(TRANSFER) or servers.NIXL)]

    def router(self, task: Task, values: Mapping[str, KnobValue]) -> Router:
        return servers.router(task, values)


ENGINE = Vllm()
