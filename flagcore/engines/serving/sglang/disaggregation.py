"""Instances that only prefill or only decode: SGLang's transfer backends, and the router in front of them.

Sources: `srt/server_args.py` of sglang 0.4.4 to 0.5.12 and `srt/arg_groups/` of 0.5.23 (the backends and flags of each
release), sglang-router 0.3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import in_versions
from flagcore.domain.space import Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.launch.server import TRANSFER_PORT, URL, Instance, Router
from flagcore.engines.serving.load.routing import PREFILL
from flagcore.engines.serving.sglang import knobs as own
from flagcore.engines.serving.space.hardware import DP, PP, PREFILL_DECODE, TP, Hardware
from flagcore.engines.serving.space.knobs import TRANSFER, code
from flagcore.engines.serving.space.placement import roles

RELEASES = {"mooncake": ">=0.4.6", "nixl": ">=0.4.6"}
"""The releases that have a backend. Those of vendors are passed as disaggregation_transfer_backend in engine_args."""
OTHER_SIDE = ">=0.4.8,<0.5.10"
"""The releases in which each kind needs the layout of the other kind."""
BACKEND = "disaggregation-transfer-backend"


def of_kind(task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
    """Return an instance with the flags of its kind. `values` are those of the candidate."""
    flags = ["--disaggregation-mode", kind]
    if BACKEND not in own.PROGRAM.parse(task.spec).others:
        flags += [f"--{BACKEND}", str(values.get(TRANSFER) or "mooncake")]
    flags += ["--disaggregation-bootstrap-port", TRANSFER_PORT]
    if in_versions(OTHER_SIDE, own.PROGRAM.version(task.spec)):
        prefill, decode = (each.layout for each in roles(str(values[PREFILL_DECODE])))
        if kind == PREFILL:
            sizes = {"decode-tp": decode[TP] * decode[DP], "decode-dp": decode[DP]}
        else:
            sizes = {"prefill-pp": prefill[PP]}
        flags += [word for name, size in sizes.items() for word in (f"--disaggregation-{name}", str(size))]
    return replace(instance, argv=(*instance.argv, *flags))


def router(task: Task, values: Mapping[str, KnobValue]) -> Router:
    """Return SGLang's router.

    Its release 0.3.2 answers completions whose prompt is token ids with HTTP 422: only clients that send text can use
    it.
    """
    program = (own.PROGRAM.start_command(task.spec)[0], "-m", "sglang_router.launch_router")
    if values.get(PREFILL_DECODE):
        return Router.of_pairs(program, "--pd-disaggregation", ("--prefill", URL, TRANSFER_PORT))
    return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules for backends."""
    version, knob, on_cores = own.PROGRAM.version(task.spec), own.BY_NAME[TRANSFER], Hardware.of(task).on_cores
    known = [word for word, releases in RELEASES.items() if in_versions(releases, version)]
    codes = [0, *(code(knob, word) for word in known)] if known else []
    lacking = ", ".join(f"{word} needs sglang {releases}" for word, releases in RELEASES.items() if word not in known)
    return (
        Rule(
            name="transfer_release",
            knobs=(PREFILL_DECODE, TRANSFER),
            message=f"sglang {version} has the backends {' and '.join(known) or 'of no kind'} for {PREFILL_DECODE}"
            + (f"; {lacking}" if lacking else ""),
            broken=lambda c: (c[PREFILL_DECODE] > 0) & ~np.isin(c[TRANSFER], codes),
        ),
        Rule(
            name="transfer_on_cores",
            knobs=(PREFILL_DECODE,),
            message=f"{PREFILL_DECODE} needs devices: SGLang's backends do not move caches between CPU cores",
            broken=lambda c: (c[PREFILL_DECODE] > 0) & on_cores,
        ),
    )
