"""SGLang as an engine of serving."""

from collections.abc import Mapping

from flagcore_serving.engine import ServingEngine
from flagcore_serving.load.routing import BOOTSTRAP
from flagcore_serving.space.settings import PublishedRuns

from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore_sglang import rules, servers, space


class Sglang(ServingEngine):
    """SGLang (`sglang.launch_server`)."""

    name = "sglang"
    where = "flagcore_sglang:REPORTS"
    program = space.PROGRAM
    modules: Mapping[str, str] = {"sglang": "sglang>=0.5,<0.6"}
    host_address = "SGLANG_HOST_IP"
    host_times = (10e-3, 0.5e-3)  # measured on 2 cores, with 50 million parameters and 4 to 16 clients
    receive_flag = servers.RECEIVE
    published_runs = PublishedRuns(
        cache_type="fp8_e4m3",
        memory_flag="mem-fraction-static",
        release="0.5.9",
        engine_args={"": {servers.RECEIVE: 30, "max-prefill-tokens": 32768}},  # as in InferenceMAX's recipes
        # sgl-project/sgl-cookbook runs `bench_serving` without a range, so that lengths start from 1 (500 prompts of
        # up to 1,000 tokens have 249,331).
        drawn={(1000, 1000): 0.0, (1000, 8000): 0.0, (8000, 1000): 0.0},
        # ai-dynamo/aiconfigurator #258 of 2026-01-19, when it ran 0.5.6.post2: `--enable-mix-chunk` before is no flag.
        generated={space.MIXED: ("0.5.6", True)},
        # lmsys.org, 2025-05-05, large-scale EP (H100), and ishandhanani/srt-slurm recipes/ (GB200, GB300).
        wide_copies=32,
        wide_chunk=(space.CHUNK, 16384),
    )

    merges = staticmethod(rules.merges)
    rules = staticmethod(rules.rules_of)
    settings = staticmethod(space.settings)
    server = staticmethod(servers.server)
    on_host = staticmethod(servers.on_host)
    of_kind = staticmethod(servers.of_kind)
    router = staticmethod(servers.router)

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        return BOOTSTRAP


ENGINE = Sglang()
