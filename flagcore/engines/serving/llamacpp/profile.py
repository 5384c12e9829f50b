"""llama.cpp: the user's own llama-server, or the server of the xllamacpp wheel with the same flags.

Sources of the rules: the server's README, and runs of the server of xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.server import PORT, Instance, address
from flagcore.engines.serving.llamacpp import knobs as own
from flagcore.engines.serving.llamacpp.knobs import (
    BATCH_THREADS,
    FLASH,
    LAYERS,
    MAX_SLOTS,
    N_BATCH,
    N_UBATCH,
    PARALLEL,
    PROGRAM,
    SLOT_GRAIN,
    SPLIT,
    THREADS,
    UBATCH,
    UNIFIED,
)
from flagcore.engines.serving.llamacpp.reports import REPORTS
from flagcore.engines.serving.llamacpp.server import AUTO_SLOTS, FLAGS_BY_NAME
from flagcore.engines.serving.space import knobs
from flagcore.engines.serving.space.hardware import INSTANCES, PP, TP, Hardware, count, longest_request
from flagcore.engines.serving.space.knobs import CONTEXT, KV, SPECULATION, or_default
from flagcore.engines.serving.space.rules import (
    check_images,
    context_rules,
    same_as_unset,
    speculation_rules,
    split_rules,
)

RUNNER = "flagcore.engines.serving.llamacpp.server"


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    spec = task.spec
    other_args = PROGRAM.parse(spec).others
    is_embedded = spec.serve.command is None
    command = (sys.executable, "-m", RUNNER) if is_embedded else PROGRAM.start_command(spec)
    argv = [*command, "--model", spec.serve.weights or "", "--host", address(task), "--port", PORT, "--metrics"]
    argv += knobs.arguments([knob for knob in own.KNOBS if knob.name != CONTEXT], values)
    slots, context = _int(values.get(PARALLEL)), _int(values.get(CONTEXT))
    if (slots or context) and not own.total_context(task):
        argv += ["--ctx-size", str((slots or AUTO_SLOTS) * own.slot_context(task, context))]
    if values.get(KV) is not None:
        argv += ["--cache-type-k", str(values[KV]), "--cache-type-v", str(values[KV])]
    if values.get(UNIFIED) is not None:
        argv += ["--kv-unified" if values[UNIFIED] == "on" else "--no-kv-unified"]
    if values.get(SPLIT) is None and count(values, TP) > 1:
        argv += ["--split-mode", "row"]
    if values.get(THREADS) is None and cores and count(values, INSTANCES) > 1:
        argv += ["--threads", str(len(cores))]
    if not other_args.keys() & {"cache-ram", "cram"} and not own.host_cache_mib(task):
        argv += ["--cache-ram", "0"]
    if is_embedded and not other_args.keys() & {"verbosity", "log-verbosity", "lv"}:
        argv += ["--verbosity", "4"]  # the level that logs batch sizes and attention
    if values.get(SPECULATION) is None and SPECULATION in spec.space:  # other candidates have the draft model
        other_args = {name: value for name, value in other_args.items() if not name.startswith("spec-")}
    argv += [word for name, value in other_args.items() for word in _flag(name, value)]
    return Instance(argv=tuple(argv), environment={"OMP_WAIT_POLICY": "passive"})


def _flag(name: str, value: EngineArg) -> Sequence[str]:
    """Return a flag of `engine_args` as words. True is a bare flag, false its opposite, unless its values are on and
    off.
    """
    flag = FLAGS_BY_NAME.get(name)
    spelling = f"-{name}" if flag and f"-{name}" in (*flag.names, *flag.off) else f"--{name}"
    if value is None:
        return ()
    if not isinstance(value, bool):
        return (spelling, str(value))
    if flag and (flag.kind == "on/off" or "on" in flag.words):
        return (spelling, "on" if value else "off")
    if value:
        return (spelling,)
    return (flag.off[-1],) if flag and flag.off and name not in flag.off else (f"--no-{name}",)


def _int(value: KnobValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of llama.cpp for legal candidates."""
    check_images(task, "mmproj")
    hardware, total = Hardware.of(task), own.total_context(task)
    return (
        *split_rules(task, data=False),
        *_split_mode_rules(hardware),
        *_batch_rules(),
        Rule(
            name="threads_on_cores",
            knobs=(INSTANCES, THREADS, BATCH_THREADS),
            message=f"{THREADS} (and {BATCH_THREADS}) x {INSTANCES} must not exceed the {hardware.cards} cores",
            broken=lambda c: (
                (np.maximum(c[THREADS], c[BATCH_THREADS]) > hardware.share(c[INSTANCES])) & hardware.on_cores
            ),
        ),
        *context_rules(task, CONTEXT),
        Rule(
            name="context_grain",
            knobs=(CONTEXT,),
            message=f"{CONTEXT} must be a multiple of {SLOT_GRAIN}, to which llama.cpp rounds it up",
            broken=lambda c: c[CONTEXT] % SLOT_GRAIN != 0,
        ),
        *((_slot_context(task, total),) if total else ()),
        *speculation_rules(
            task,
            PROGRAM,
            own.NEED_DRAFT_MODEL,
            "spec-draft-model",
            "draft-mtp",
        ),
    )


def _split_mode_rules(hardware: Hardware) -> tuple[Rule, ...]:
    none_code, layer_code, *row_codes = (PROGRAM.code(SPLIT, name) for name in ("none", "layer", "row", "tensor"))
    return (
        Rule(
            name="cores_are_not_split",
            knobs=(TP, PP),
            message=f"{TP} and {PP} must be 1 on CPU cores: threads share the work",
            broken=lambda c: ((c[TP] > 1) | (c[PP] > 1)) & hardware.on_cores,
        ),
        Rule(
            name="one_split",
            knobs=(TP, PP),
            message=f"llama.cpp splits by rows ({TP}) or by layers ({PP}), not both",
            broken=lambda c: (c[TP] > 1) & (c[PP] > 1),
        ),
        Rule(
            name="split_mode",
            knobs=(TP, PP, SPLIT),
            message=f"split_mode row or tensor needs {TP} > 1, layer {PP} > 1, none neither",
            broken=lambda c: (
                (np.isin(c[SPLIT], row_codes) & ((c[TP] == 1) | (c[PP] > 1)))
                | ((c[SPLIT] == layer_code) & ((c[PP] == 1) | (c[TP] > 1)))
                | ((c[SPLIT] == none_code) & ((c[TP] > 1) | (c[PP] > 1)))
            ),
        ),
    )


def _batch_rules() -> tuple[Rule, ...]:
    plain_codes = [0, *(PROGRAM.code(KV, name) for name in own.PLAIN_KV)]
    off_code = PROGRAM.code(FLASH, "off")
    return (
        Rule(
            name="most_slots",
            knobs=(PARALLEL,),
            message=f"{PARALLEL} must not exceed {MAX_SLOTS}",
            broken=lambda c: c[PARALLEL] > MAX_SLOTS,
        ),
        Rule(
            name="batch_holds_slots",
            knobs=(PARALLEL, N_BATCH),
            message=f"{N_BATCH} must be at least {PARALLEL}, or llama.cpp aborts",
            broken=lambda c: (c[N_BATCH] > 0) & (c[N_BATCH] < or_default(c[PARALLEL], AUTO_SLOTS)),
        ),
        Rule(
            name="ubatch_in_batch",
            knobs=(N_BATCH, N_UBATCH),
            message=f"{N_UBATCH} must not exceed {N_BATCH} (default {PROGRAM.defaults[N_BATCH]})",
            broken=lambda c: c[N_UBATCH] > PROGRAM.values(c, N_BATCH),
        ),
        Rule(
            name="quantized_cache",
            knobs=(FLASH, KV),
            message=f"a quantized {KV} needs flash_attention",
            broken=lambda c: (c[FLASH] == off_code) & ~np.isin(c[KV], plain_codes),
        ),
    )


def _slot_context(task: Task, total: int) -> Rule:
    needed = longest_request(task.spec.serve.loads, task.spec.model.vision)
    return Rule(
        name="slot_context",
        knobs=(PARALLEL, UNIFIED),
        message=f"ctx-size = {total} over {PARALLEL} slots must be at least {needed} per slot, the longest request",
        broken=lambda c: own.slot_share(c, total) < needed,
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges of knobs without effect and of llama.cpp's defaults."""
    hardware = Hardware.of(task)
    default_codes = [PROGRAM.code(SPLIT, name) for name in ("none", "layer", "row")]

    def batches(c: Columns) -> Columns:
        default = np.minimum(UBATCH, PROGRAM.values(c, N_BATCH))
        return {N_UBATCH: np.where(c[N_UBATCH] == default, 0, c[N_UBATCH])}

    on_cores = Merge(
        name="nothing_to_offload", knobs=(LAYERS,), canonical=lambda c: {LAYERS: np.full_like(c[LAYERS], -1)}
    )
    return (
        Merge(
            name="batch_threads_as_threads",
            knobs=(THREADS, BATCH_THREADS),
            canonical=lambda c: {BATCH_THREADS: np.where(c[BATCH_THREADS] == c[THREADS], 0, c[BATCH_THREADS])},
        ),
        *same_as_unset(PROGRAM),
        Merge(
            name="split_by_default",  # one device has nothing to split; stages have layers, tensor parallelism rows
            knobs=(SPLIT,),
            canonical=lambda c: {SPLIT: np.where(np.isin(c[SPLIT], default_codes), 0, c[SPLIT])},
        ),
        Merge(name="ubatch_by_default", knobs=(N_BATCH, N_UBATCH), canonical=batches),
        *((on_cores,) if hardware.on_cores else ()),
    )


WORKLOAD = Engine(
    name="llamacpp",
    where="flagcore.engines.serving.llamacpp.reports:REPORTS",
    program=PROGRAM,
    modules={own.PACKAGE: own.PACKAGE},
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    reports=REPORTS,
    split_by=PP,
    host_times=(1.9e-3, 0.5e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients
)
