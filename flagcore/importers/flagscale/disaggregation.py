"""Translates FlagScale's instances that only prefill or only decode.

FlagScale starts prefill_num and decode_num instances with the same arguments, behind its own router, and moves caches
with vLLM's P2pNcclConnector. Source: FlagScale 0.8 `flagscale/runner/runner_serve.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.engines.megatron.importing.arguments import flag_name
from flagcore.engines.serving.common.hardware import PP, PREFILL_DECODE, TP
from flagcore.engines.serving.common.knobs import LAYOUT, TRANSFER
from flagcore.importers.flagscale.source import Source, leaves

_DEPLOY = "experiment.runner.deploy"
_SWITCH = f"{_DEPLOY}.prefill_decode_disaggregation"
_OF_ONE_SERVER = ("kv_transfer_config", "disaggregation_mode")
"""Arguments of one server that only prefills or decodes, without the others."""
_SIZES = {"tensor_parallel_size": TP, "tp": TP, "pipeline_parallel_size": PP, "pp": PP}
_CONNECTOR, _DECODE_MEMORY = "P2pNcclConnector", 0.7
_IGNORED = {
    "prefill_address": "instances are placed on the hosts with room for them",
    "decode_address": "instances are placed on the hosts with room for them",
    "prefill_decode_strategy": "the router chooses the least busy instance",
    "pd_proxy_port": "the router finds the instances by its command line",
    "prefill_decode_log_dir": "logs are in the folder of the trial",
}


def check_arguments(source: Source, item: Mapping[str, Any]) -> None:
    """Raise SpecError for a single server that only prefills or decodes."""
    for path, value in leaves(item):
        if flag_name(path) in _OF_ONE_SERVER and value not in (False, "null"):
            problem = "is an argument of one of several servers, which trials would not start"
            fix = f"remove it, and set {_SWITCH}"
            raise source.error(f"serve[0]{path}", problem, value=value, fix=fix)


def convert(
    source: Source,
    engines: list[str],
    arguments: dict[str, dict[str, tuple[str, Any]]],
    spaces: dict[str, dict[str, Any]],
) -> None:
    """Set the space of a tree with two kinds of instances, which replaces the layouts. Raises SpecError."""
    if source.take(_SWITCH) is not True:
        return
    if engines != ["vllm"]:
        fix = "set auto_tuner.engines to vllm, or remove it"
        raise source.error(_SWITCH, "is for vLLM only: FlagScale starts no other engine", value=True, fix=fix)
    space, sizes = spaces["vllm"], {TP: 1, PP: 1}
    for name in list(arguments["vllm"]):
        if (knob := _SIZES.get(name.replace("-", "_"), name)) in sizes:
            sizes[knob] = arguments["vllm"].pop(name)[1]
    for name in LAYOUT:
        if space.pop(name, None) is not None:
            text = f"dropped: {_SWITCH} determines the layout"
            source.note(f"experiment.auto_tuner.space.{name}", text, f"auto_tuner.space.{PREFILL_DECODE}")
    kinds = []
    for kind in ("prefill", "decode"):
        key = f"{_DEPLOY}.{kind}_num"
        count = source.take(key)
        if not isinstance(count, (int, type(None))) or isinstance(count, bool) or (count or 1) < 1 or count == 0:
            raise source.error(key, "is not a number of instances", value=count, fix="use 1 or more")
        layout = "".join(f"{name}{sizes[knob]}" for name, knob in (("tp", TP), ("pp", PP)) if sizes[knob] != 1)
        kinds.append(f"{count or 1}x{layout or 'tp1'}")
    space[PREFILL_DECODE], space[TRANSFER] = ["+".join(kinds)], [_CONNECTOR]
    source.note(_SWITCH, f"is {PREFILL_DECODE} = {space[PREFILL_DECODE][0]}", f"auto_tuner.space.{PREFILL_DECODE}")
    source.note(_SWITCH, f"moves caches by {_CONNECTOR}", f"auto_tuner.space.{TRANSFER}")
    memory = source.take(f"{_DEPLOY}.decode_gpu_memory_utilization") or _DECODE_MEMORY
    text = f"dropped ({memory}, of decoding instances): both kinds have the share of the space or of the engine"
    source.note(f"{_DEPLOY}.decode_gpu_memory_utilization", text, "auto_tuner.space.gpu_memory_utilization")
    for name, reason in _IGNORED.items():
        if (value := source.take(f"{_DEPLOY}.{name}")) is not None:
            source.note(f"{_DEPLOY}.{name}", f"dropped ({value}): {reason}", "serve")
