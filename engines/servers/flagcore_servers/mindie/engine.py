"""MindIE (`mindie_llm_server`, earlier `mindieservice_daemon`) with the backend ATB; no server was run.

Sources: docs/zh/user_guide of MindIE-LLM 2.2 to 3.1 (user_manual/service_parameter_configuration.md, quick_start and
feature/{data_parallel,expert_parallel,prefix_cache,mtp}.md; mirror verylucky01/MindIE-LLM @2ad5b22e), and the pages
mindie_llm0030 (health) and mindie_service0285 (configuration) of hiascend.com.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flagcore_serving.job import EngineArg
from flagcore_serving.launch.server import Instance, address
from flagcore_serving.space import knobs, rules
from flagcore_serving.space.hardware import DP, TP, Hardware, count, longest_request
from flagcore_serving.space.knobs import CONTEXT, DRAFTED, PREFIX, SPECULATION, as_words, or_default
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import weight_bytes

from flagcore.domain.launch import PORT
from flagcore.domain.space import Columns, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore_servers.untested import OneVendor, expert_parallel, longest_prompt, pairs, prefill_tokens, whole_prompts

BATCH, TOKENS, BLOCK, MEMORY = "max_batch_size", "max_prefill_tokens", "cache_block_size", "npu_mem_size"
DEPLOY, SCHEDULE = "BackendConfig.ModelDeployConfig", "BackendConfig.ScheduleConfig"
MODEL, SERVER = f"{DEPLOY}.ModelConfig", "ServerConfig"
WORLD, PLUGIN = f"{MODEL}.worldSize", f"{MODEL}.plugin_params.plugin_type"
TLS = re.compile(r"ServerConfig\.\w*([tT]ls|interComm|kmc)|BackendConfig\.interNode")
CONFIG = "MIES_CONFIG_JSON_PATH"
SHARE, SHARE_VARIABLE = 0.8, "NPU_MEMORY_FRACTION"
START = f'umask 027 && printf %s "$1" > "$2" && export {CONFIG}="$PWD/$2" && shift 2 && exec "$@"'
"""A command of sh that writes the file of settings, which the server refuses if others may read it, and starts it."""


class MindieProgram(Program):
    """MindIE's server. Its flags are the keys of its file of settings, with a dot between the sections."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """See `Program`. The size of tensor parallelism is by default that of the instance, by those of attention DP;
        plugins are knobs, or stay if they are none. Keys for TLS have no effect without it."""
        result = {name: value for name, value in args.items() if not TLS.match(name)}
        devices, data = args.get(WORLD), args.get(f"{MODEL}.dp")
        if data in (-1, "-1"):
            del result[f"{MODEL}.dp"]
        if isinstance(devices, int) and f"{MODEL}.tp" not in result:
            result[f"{MODEL}.tp"] = devices // max(data if isinstance(data, int) else 1, 1)
        plugins = [each.strip() for each in str(result.pop(PLUGIN, "")).split(",")]
        result |= {PREFIX: True} if "prefix_cache" in plugins else {}
        if others := ",".join(each for each in plugins if each not in ("", "prefix_cache")):
            result[PLUGIN] = others
        return result


PROGRAM = MindieProgram.read(__package__)


def _share(task: Task) -> float:
    """Return the share of the memory for weights and cache. Raises SpecError."""
    text, share = task.spec.envs.get(SHARE_VARIABLE, str(SHARE)), 0.0
    with suppress(ValueError):
        share = float(text)
    if not 0.0 < share <= 1.0:
        problem, fix = "is not a share of the memory", "write a number above 0 and at most 1"
        raise SpecError(key=f"envs.{SHARE_VARIABLE}", value=text, problem=problem, fix=fix)
    return share


def _typed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class MindIE(OneVendor):
    """MindIE."""

    name = "mindie"
    where = "flagcore_servers.mindie:REPORTS"
    program = PROGRAM
    modules: Mapping[str, str] = {"mindie_llm": "mindie_llm>=2.2"}
    vendor = "ascend"

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return MindIE's effective settings. The cache has a fixed size, or the rest of a share of the memory. Prompts
        are not divided, and have iterations of their own (`engine.yaml`)."""
        values = PROGRAM.columns(task, columns)
        ranks = values[TP] * values[DP]
        rest = _share(task) * Hardware.of(task).memory_bytes - weight_bytes(task) / ranks
        return Settings.of(
            task,
            values,
            PROGRAM,
            max_running=PROGRAM.values(values, BATCH),
            max_batched_tokens=prefill_tokens(task, values[TOKENS], int(PROGRAM.defaults[TOKENS] or 0)),
            block_size=PROGRAM.values(values, BLOCK),
            chunked=np.zeros_like(ranks),
            cache_bytes=np.where(values[MEMORY] > 0, values[MEMORY] * 2.0**30, np.maximum(rest, 0.0)),
            drafted=np.where(values[SPECULATION] > 0, or_default(values[DRAFTED], 1), 0),
        )

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        spec, tensor, data, longest = task.spec, count(values, TP), count(values, DP), longest_request(task)
        host = "0.0.0.0" if spec.serve.elsewhere == "image" else address(task)
        tokens = values.get(TOKENS) or int(prefill_tokens(task, np.zeros(1, dtype=np.int64), 8192)[0])
        settings: dict[str, Any] = {
            **dict.fromkeys((f"{SERVER}.ipAddress", f"{SERVER}.managementIpAddress"), host),
            **dict.fromkeys((f"{SERVER}.port", f"{SERVER}.managementPort", f"{SERVER}.metricsPort"), PORT),
            f"{SERVER}.httpsEnabled": "false",
            f"{SERVER}.allowAllZeroIpListening": "true",
            "BackendConfig.npuDeviceIds": json.dumps([list(range(tensor * data))]),
            f"{DEPLOY}.maxSeqLen": values.get(CONTEXT) or longest,
            f"{DEPLOY}.maxInputTokenLen": longest_prompt(task),
            f"{MODEL}.modelName": "model",
            f"{MODEL}.modelWeightPath": spec.serve.weights or "",
            WORLD: tensor * data,
            f"{SCHEDULE}.maxPrefillTokens": tokens,
            f"{SCHEDULE}.maxIterTimes": longest,
        }
        argv = [*PROGRAM.start_command(spec), *as_words(settings, has_negation=False)]
        argv += knobs.arguments(PROGRAM.knobs, {**values, CONTEXT: None, TOKENS: None})
        argv += [f"--{MODEL}.tp", str(tensor)] if data > 1 and tensor == 1 else []
        others = PROGRAM.parse(spec).others
        argv += as_words({name: value for name, value in others.items() if name != WORLD}, has_negation=False)
        return Instance(argv=tuple(argv), environment={"MINDIE_LOG_TO_STDOUT": "1"})

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return MindIE's legality rules for candidates."""
        return (
            *rules.split_rules(task, attention_and_experts=True, pipeline=False),
            *rules.forbidden(task, PROGRAM),
            expert_parallel(task),
            whole_prompts(task, TOKENS),
            *rules.speculation_rules(task, PROGRAM, (), "", "mtp"),
            *rules.context_rules(task),
        )

    def form(self, instance: Instance) -> Instance:
        """Return a server whose flags are in a file of settings, which a shell writes before it starts the server."""
        start = next(number for number, word in enumerate(instance.argv) if word.startswith("--"))
        content: dict[str, Any] = {"Version": "1.0.0"}
        for path, value in pairs(instance.argv[start:]):
            section, (*sections, name) = content, path.split(".")
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = True if value is None else _typed(value)
        model = content["BackendConfig"]["ModelDeployConfig"]["ModelConfig"]
        params = model.get("plugin_params", {})
        plugins = [params.get("plugin_type"), "prefix_cache" if params.pop("prefix_cache", False) else None]
        if types := ",".join(filter(None, plugins)):
            model["plugin_params"] = json.dumps({**params, "plugin_type": types})
        content["BackendConfig"]["ModelDeployConfig"]["ModelConfig"] = [model]
        text = json.dumps(content).replace(json.dumps(PORT), PORT)
        return replace(instance, argv=("sh", "-c", START, "sh", text, f"mindie-{PORT}.json", *instance.argv[:start]))


ENGINE = MindIE()
