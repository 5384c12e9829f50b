"""One prediction in full, as text: the model, the memory of its worst stage, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.serving import STATISTICS
from flagcore.report.formats import table

COMPONENTS = {
    "embedding": "Embedding",
    "qkv_proj": "QKV Proj",
    "core_attention": "Core Attn",
    "out_proj": "Out Proj",
    "ffn": "FFN Up&Down",
    "router": "Router",
    "experts": "Experts",
    "shared_experts": "Shared Experts",
    "norms": "Layernorms",
    "mtp": "MTP Module",
    "output_head": "Output",
}
"""What reports call the components of a layer, in this order."""

HEADINGS = {
    "weights_gib": "weights GiB",
    "gradients_gib": "gradients GiB",
    "main_params_gib": "main params GiB",
    "optimizer_gib": "optimizer GiB",
    "activation_gib": "activation GiB",
}
"""Headings of a component's figures, as far as they are there."""

LEFT_OVER = "left over"
"""The peak less the components: what its moment needs beside them, such as temporaries of the optimizer, or (below
zero) what is gone by then."""

NEXT_TO_NOTHING = 0.0005
"""GiB that are left out of the parts of a device's memory."""

PARTS = {
    "compute_s": "compute",
    "tp_comm_s": "tensor parallel",
    "cp_comm_s": "context parallel",
    "ep_comm_s": "expert parallel",
    "pp_bubble_s": "bubble",
    "pp_comm_s": "pipeline exchange",
    "dp_comm_exposed_s": "gradient exchange",
    "optimizer_s": "optimizer",
    "queue_s": "queue",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "collectives_s": "collectives",
    "host_s": "host",
}
"""What reports call the parts of a step, and of a request that is served."""

VERDICT = {True: "; it fits", False: "; it does not fit", None: "; nobody knows how much the device has"}

RATES_IN_WORDS = {
    "output_tokens_per_s": "output tokens a second",
    "total_tokens_per_s": "tokens a second, prompts included",
    "requests_per_s": "requests a second",
    "goodput_requests_per_s": "requests a second that keep the SLO",
    "output_tokens_per_s_per_device": "output tokens a second and device",
}
LATENCIES_IN_WORDS = {
    "ttft_s": "time to first token (TTFT)",
    "tpot_s": "time per token after it (TPOT)",
    "itl_s": "between two pieces (ITL)",
    "e2e_s": "whole answer (e2e)",
}
PARTS_IN_WORDS = {
    "queue_s": "waiting for a place, and for the prompts of others",
    "prefill_s": "computing its own prompt",
    "decode_s": "computing its answer, token by token",
    "collectives_s": "messages between devices",
    "host_s": "scheduling, sampling, launching, and the HTTP front end",
}
"""What the parts of a request's time are."""


def part_name(part: str) -> str:
    """Return what reports call a part of a step, or of a request's time."""
    return PARTS.get(part) or PARTS_IN_WORDS.get(part, (part, ""))[0]


def explained(record: Mapping[str, Any]) -> str:
    """Return a prediction with its model's parts as text. What is not known is said to be unknown."""
    if record.get("status", "ok") != "ok":
        return f"{record['status']}: {record['reason']}"
    if "objective" in record:
        return served_text(record)
    parts = [model_text(record["model"]), memory_text(record["memory"]), time_text(record)]
    return "\n\n".join(parts)


def served_text(record: Mapping[str, Any]) -> str:
    """Return what is predicted of a server: its rates and latencies, where a request's time goes, and its memory."""
    rates = [
        f"~{_number(record[name])} {words}"
        for name, words in RATES_IN_WORDS.items()
        if name in record and not (name.startswith("goodput") and record[name] == record.get("requests_per_s"))
    ]
    latencies = {words: record[name] for name, words in LATENCIES_IN_WORDS.items() if name in record}
    rows = [[words, *(_number(each[of]) for of in STATISTICS)] for words, each in latencies.items()]
    parts = [part for part in ("\n".join(rates), table(["~ seconds", *STATISTICS], rows) if rows else "") if part]
    time = record.get("time", {})
    whole = sum(time.values())
    if whole > 0.0:
        shares = [
            [PARTS.get(name, name), _number(seconds), f"{seconds / whole:.1%}", PARTS_IN_WORDS.get(name, "")]
            for name, seconds in time.items()
        ]
        head = f"A request takes ~{_number(whole)} s in the mean:"
        parts.append(f"{head}\n{table(['part', '~s', 'share', 'what it is'], shares)}")
    elif record.get("reason"):
        parts.append(str(record["reason"]))
    return "\n\n".join([*parts, _served_memory(record["memory"])])


def _served_memory(memory: Mapping[str, Any]) -> str:
    """Return what a device that serves holds, in a sentence."""
    cache = memory.get("kv_cache_gib", 0.0)
    held = [
        f"{memory['static_gib'] - cache:.2f} GiB of weights",
        f"{memory['activation_gib']:.2f} of activations and graphs",
    ]
    if cache:
        tokens = f" ({memory['kv_cache_tokens']:,.0f} tokens over all instances)" if "kv_cache_tokens" in memory else ""
        held.append(f"{cache:.2f} of cache for keys and values{tokens}")
    capacity = f" of {memory['capacity_gib']:.2f}" if "capacity_gib" in memory else ""
    used = f"~{memory['device_used_gib']:.2f}{capacity} GiB are in use{VERDICT[memory.get('fits')]}."
    return f"A device holds ~{', ~'.join(held)}; {used}"


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def model_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the weights of a model by its parts, in billions."""
    rows = [
        [part["component"], _billions(part["params_per_layer"]), str(part["layers"]), _billions(part["params"])]
        for part in parts
    ]
    rows.append(["Total", "", "", _billions(sum(part["params"] for part in parts))])
    return table(["", "per-layer param(B)", "num layers", "params(B)"], rows)


def memory_text(memory: Mapping[str, Any]) -> str:
    """Return what the worst stage holds by component, and the sums up to what the device shows in use.

    Components add up to static memory and activations, which need not be there at one time; what the peak has beside
    or less is left over, and the figures of the total add up to the peak.
    """
    components = memory.get("components", {})
    figures = [key for key in HEADINGS if any(key in part for part in components.values())]
    names = sorted(components, key=lambda name: (list(COMPONENTS).index(name) if name in COMPONENTS else 99, name))
    rows = [
        [
            COMPONENTS.get(name, name),
            f"{components[name].get('params', 0.0):,.0f}",
            *(_gib(components[name].get(key, 0.0)) for key in figures),
        ]
        for name in names
    ]
    static, activation = memory["static_gib"], memory["activation_gib"]
    rest = {"activation_gib": memory["peak_allocated_gib"] - static - activation}
    totals = {key: sum(part.get(key, 0.0) for part in [*components.values(), rest]) for key in ("params", *figures)}
    for name, row in ((LEFT_OVER, rest), ("Total", totals)):
        rows.append([name, f"{row.get('params', 0.0):,.0f}", *(_gib(row.get(key, 0.0)) for key in figures)])
    capacity = f" of {memory['capacity_gib']:.2f}" if "capacity_gib" in memory else ""
    return "\n".join(
        [
            f"On a device of pipeline stage {memory['worst_stage']}, the one with the least room:",
            table(["Item", "Params", *(HEADINGS[key] for key in figures)], rows),
            "",
            f"Theoretical memory footprints: weight and optimizer={static * 1024:.2f} MB, "
            f"activation={activation * 1024:.2f} MB, total={(static + activation) * 1024:.2f} MB",
            f"Peak allocated {memory['peak_allocated_gib']:.2f} GiB, reserved {memory['reserved_gib']:.2f} GiB, "
            f"in use on the device {memory['device_used_gib']:.2f}{capacity} GiB{VERDICT[memory.get('fits')]}",
        ]
    )


def memory_parts(memory: Mapping[str, Any]) -> dict[str, float]:
    """Return what makes up the memory in use of a device, in GiB: states and activations by kind, and what is beyond.

    The figures add up to `device_used_gib`; those that are next to nothing are left out.
    """
    components, static, peak = memory.get("components", {}), memory["static_gib"], memory["peak_allocated_gib"]
    if "kv_cache_gib" in memory:
        states = {"weights": static - memory["kv_cache_gib"], "cache": memory["kv_cache_gib"]}
    elif components:
        kinds = {key: name.removesuffix(" GiB") for key, name in HEADINGS.items() if key != "activation_gib"}
        states = {name: sum(part.get(key, 0.0) for part in components.values()) for key, name in kinds.items()}
        states["other states"] = static - sum(states.values())
    else:
        states = {"weights and optimizer": static}
    parts = {
        **states,
        "activations": memory["activation_gib"],
        LEFT_OVER: peak - static - memory["activation_gib"],
        "allocator": memory["reserved_gib"] - peak,
        "context and libraries": memory["device_used_gib"] - memory["reserved_gib"],
    }
    return {name: gib for name, gib in parts.items() if abs(gib) >= NEXT_TO_NOTHING}


def needs_text(memory: Mapping[str, Any]) -> str:
    """Return what a device needs of what it has, with the parts of it, in one line."""
    used, parts = memory["device_used_gib"], memory_parts(memory)
    told = ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items())
    room = f" of {memory['capacity_gib']:.2f} GiB" if "capacity_gib" in memory else ""
    stage = "" if "kv_cache_gib" in memory else f" of stage {memory['worst_stage']}"
    return f"it needs {used:.2f} GiB{room} on a device{stage}: {told}"


def time_text(record: Mapping[str, Any]) -> str:
    """Return the parts of a step with their shares, and what limits it."""
    if "step_time_s" not in record:
        why = str(record.get("reason", "")).removeprefix("no time: ")
        return f"Time: unknown, for {why}." if why else "Time: unknown."
    step, speed = record["step_time_s"], record["tokens_per_second_per_device"]["value"]
    rows = [
        [PARTS.get(name, name), f"{seconds:.4g}", f"{seconds / step['value']:.1%}"]
        for name, seconds in record["time"].items()
    ]
    rows.append(["step", f"{step['value']:.4g}", ""])
    mfu = f", MFU {record['mfu']:.1%}" if "mfu" in record else ""
    return "\n".join(
        [
            table(["Time", "s", "share"], rows),
            "",
            f"80% interval {step['low']:.4g} to {step['high']:.4g} s; {speed:,.0f} tokens/s/device{mfu}",
            f"Limited by: {record['limit']}",
        ]
    )


def knobs_text(knobs: Sequence[Mapping[str, Any]]) -> str:
    """Return the knobs that plugins bring to an engine: values, effect, and why a trial cannot have one."""
    if not knobs:
        return ""
    rows = []
    for knob in knobs:
        for effect in knob["effects"]:
            value = str(effect["value"])
            how = " ".join([*effect["flags"], *(f"{name}={to}" for name, to in effect["environment"].items())])
            formulas = f"as {', '.join(f'{key}={to}' for key, to in effect['settings'].items())}; "
            part = "" if effect["part"] == "step" else f" of {PARTS.get(effect['part'], effect['part'])}"
            time = f"{formulas if effect['settings'] else ''}x{_range(effect['time'])}{part}"
            why = knob["not_launched"].get(value)
            launched = f"predicted only: {why}" if why else how
            spec = "yes" if knob["in_space"] else "no"
            rows.append([knob["knob"], value.lower(), spec, time, f"x{_range(effect['memory'])}", launched])
    heading = "Knobs that plugins bring here; a space names them, `auto` takes those that can be launched:"
    told = [f"{knob['knob']}: {knob['says']}. {_sentence(knob)}" for knob in knobs]
    headings = ["knob", "value", "in space", "time", "peak memory", "switched on by"]
    return "\n".join([heading, table(headings, rows), "", *told])


def _sentence(knob: Mapping[str, Any]) -> str:
    needs = f"Needs {', '.join(knob['needs'])}. " if knob["needs"] else ""
    claim = f"Its source: {knob['claim']}. " if knob["claim"] else ""
    effect = f" Its effect here: {knob['effect']}." if knob["effect"] else ""
    return f"{needs}{claim}({knob['source']}){effect}"


def _range(factor: Mapping[str, float]) -> str:
    if factor["low"] == factor["high"]:
        return f"{factor['value']:g}"
    return f"{factor['value']:g} ({factor['low']:g} to {factor['high']:g})"


def notes_text(notes: Sequence[str]) -> str:
    """Return what plugins say of engine and chip, a line each."""
    return "\n".join(["To know of this engine on this chip:", *(f"- {note}" for note in notes)]) if notes else ""


def _gib(size: float) -> str:
    return f"{size:.3f}".replace("-0.000", "0.000")


def _billions(count: float) -> str:
    return f"{count / 1e9:.4f}"
