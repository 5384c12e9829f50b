"""The settings that job records of published runs omit. They are filled in as follows:

- The KV cache has 8-bit elements if the chip computes in 4 bits and the weights have fewer than 16 bits: recipes for
  such chips use such a cache, and the numbers of requests in published points confirm it. Otherwise it has 16 bits.
- If the weights take more than 80% of a device's memory, the engine may use 95% of that memory.
- A missing release, or a commit instead of a release, but no build (`model.work.build_of`), is replaced with
  `PublishedRuns.release`, which dates from the time of the measurements.
- Experts on several hosts have the copies, load balancer, chunks and overlap of published recipes, unless the record
  has one of these or an exchange, and the exchange of published runs, unless it has one.
- Lengths that only the client of InferenceX or of an engine's own pages has are drawn from the range of that client.
- TP and EP are those of InferenceX's recipes where aiconfigurator's table has a square (TP 64, EP 8: 8; TP 4, DP 4: 4).
- Other settings come from the engine's `PublishedRuns`, flags only with the lengths of InferenceX, then from its
  defaults.
"""

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from flagcore_importers.programs import release

from flagcore.contracts import Published
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore_serving.job import ServeSpec
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.model.simulated_load import STEADY_RATIO, WAVES_IN_FLIGHT
from flagcore_serving.model.work import build_of
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space import rules
from flagcore_serving.space.hardware import DP, EP, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.roles import language, roles
from flagcore_serving.space.settings import PublishedRuns
from flagcore_serving.space.weights import WIDE_PRECISIONS, weight_bytes

WIDE_RECIPE = (common_knobs.EXCHANGE, common_knobs.OVERLAP, common_knobs.REDUNDANT, common_knobs.BALANCING)
"""Knobs that describe how experts on several hosts are served. A record with one of them has its own recipe."""
EXCHANGES = (common_knobs.EXCHANGE, common_knobs.PREFILL_EXCHANGE)
INFERENCEX = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Lengths of InferenceX's prompts and answers. Its client sends `WAVES_IN_FLIGHT` requests per client."""
LAYOUT = (TP, DP, EP)
GENERATOR = "aiconfigurator"
"""The source of records of servers whose commands this generator of NVIDIA wrote."""
UNASKED, UNASKED_CPUS, CPUS = "InferenceX experimental", 2, "cluster.cpus_per_node"
"""The source of records of a Slurm job that asks for devices, but for no CPUs (SemiAnalysisAI/InferenceX
`experimental/token_position_decode_slo`), and what it gets by default: one core, with two hardware threads."""
CROWDED_SHARE, RAISED_SHARE = 0.8, 0.95
"""Share of a device's memory for the weights above which published runs raise the engine's share, and to what."""


def published(engine: EngineProfile, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
    """Return the task and the knob values of a job record, with omitted settings filled in (see the module)."""
    serve, chip, runs = task.spec.serve, task.cluster.groups[0].chip, engine.published_runs
    parsed = engine.parse(values)
    if runs.cache_type and serve.precision not in WIDE_PRECISIONS and "fp4" in chip.dense_flops_per_second:
        parsed.setdefault(common_knobs.KV, runs.cache_type)
    version = serve.engine_version or ""
    if runs.release and release(version) is None and not build_of(engine.program.overheads, version):
        serve = replace(serve, engine_version=runs.release)
    serve, lengths = _as_sent(serve, runs, task.spec.model.name), (serve.loads[0].input_len, serve.loads[0].output_len)
    sizes, ranks = [count(parsed, each) for each in LAYOUT], math.isqrt(count(parsed, TP) * count(parsed, DP))
    is_squared = ranks**2 > chip.devices_per_node and sizes in ([ranks**2, 1, ranks], [ranks, ranks, ranks**2])
    run = dict(zip(LAYOUT, (ranks, 1, ranks), strict=True)) if GENERATOR in notes and is_squared else {}
    assumed = run | _as_in_production(engine, task, {**parsed, **run})
    if GENERATOR in notes and lengths not in INFERENCEX and not parsed.get(PREFILL_DECODE) and count(parsed, PP) == 1:
        known = release(serve.engine_version or "") or ()
        written = {name: each for name, (since, each) in runs.generated.items() if known >= (release(since) or ())}
        assumed |= {name: each for name, each in written.items() if name not in parsed}
    parsed |= assumed
    noted = frozenset(assumed)
    if UNASKED in notes and (first := task.cluster.groups[0]).cpus_per_node is None:
        groups = (replace(first, cpus_per_node=UNASKED_CPUS), *task.cluster.groups[1:])
        task, noted = replace(task, cluster=replace(task.cluster, groups=groups)), noted | {CPUS}
    if runs.memory_flag and _weights_share(task, parsed) > CROWDED_SHARE:
        serve = replace(serve, engine_args={runs.memory_flag: RAISED_SHARE, **serve.engine_args})
    # The space must contain the value of PREFILL_DECODE, which is possibly not among those of `auto`.
    space = {name: (parsed[name],) for name in (PREFILL_DECODE, *EXCHANGES) if parsed.get(name)}
    task = replace(task, spec=replace(task.spec, work=serve, space={**task.spec.space, **space}))
    return Published(task, parsed, noted, _assumed(engine, task, parsed, noted))


def _as_sent(serve: ServeSpec, runs: PublishedRuns, model: str) -> ServeSpec:
    """Return the job with the flags of the recipes, and the range of lengths, of the client that has its lengths."""
    load = serve.loads[0]
    lengths, drawn = (load.input_len, load.output_len), runs.drawn if load.num_prompts else {}
    if lengths in INFERENCEX and load.num_prompts in (None, WAVES_IN_FLIGHT * (load.concurrency or 0)):
        args = {flag: value for word, each in runs.engine_args.items() if word in model for flag, value in each.items()}
        serve = replace(serve, engine_args={**args, **serve.engine_args})
        drawn = {lengths: STEADY_RATIO}
    if load.range_ratio == 1.0 and load.concurrency:
        serve = replace(serve, loads=(replace(load, range_ratio=drawn.get(lengths, 1.0)),))
    return serve


def _as_in_production(engine: EngineProfile, task: Task, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the values that published recipes set if experts are on several hosts, unless `values` or
    `engine_args` have one of them: copies of experts, placed by a load balancer, large chunks of prompts and, if
    links end at the host, two-batch overlap. Copies are the fewest with which all ranks hold equally many."""
    runs, experts, group = engine.published_runs, task.spec.model.experts, task.cluster.groups[0]
    pair, fixed = values.get(PREFILL_DECODE), engine.program.parse(task.spec).fixed
    layouts = [each.layout for each in language(roles(str(pair)))] if pair else [{}]
    sizes = [{name: int(each.get(name, values.get(name)) or 1) for name in LAYOUT} for each in layouts]
    wide = [each for each in sizes if each[EP] > 1 and each[DP] > 1]
    ranks = [each[TP] * each[DP] for each in wide]
    recipe = {*WIDE_RECIPE, runs.wide_chunk[0]}
    if not (runs.wide_copies and experts and max(ranks, default=1) > group.devices_per_node):
        return {}
    if any(values.get(name) is not None for name in recipe) or recipe & fixed.keys():
        return {}
    copies = next(
        number
        for number in itertools.count(runs.wide_copies)
        if not any((experts + number) % each[EP] for each in wide)
    )
    chunk = {runs.wide_chunk[0]: runs.wide_chunk[1] * sizes[0][TP] * sizes[0][DP]}
    overlap = {common_knobs.OVERLAP: True} if group.link_domain <= group.devices_per_node else {}
    return {common_knobs.REDUNDANT: copies, common_knobs.BALANCING: True, **chunk, **overlap}


def _assumed(
    engine: EngineProfile, task: Task, values: Mapping[str, KnobValue], noted: Collection[str]
) -> Sequence[str]:
    """Return warnings that name the assumed values of GENERATOR, and of recipes of experts on several hosts."""
    words = {knob.name: knob.words for knob in engine.knobs}
    found = {name: values[name] for name in noted if name in values}
    written = {name: found.pop(name) for name in (*engine.published_runs.generated, *LAYOUT) if name in found}
    lines = [f"{name} = {json.dumps(value)} is assumed, as {GENERATOR} sets it" for name, value in written.items()]
    if CPUS in noted:
        lines.append(f"{CPUS} = {UNASKED_CPUS} is assumed: the job of {UNASKED} asks for no CPUs")
    for merge in rules.exchange_merge(task, engine.program):
        codes = merge.canonical(engine.columns(task, values))
        found |= {name: words[name][code[0] - 1] for name, code in codes.items() if code[0]}
    assumed = ", ".join(f"{name} = {json.dumps(found[name])}" for name in sorted(found))
    return (*lines, *([f"experts on several hosts are assumed as in published recipes: {assumed}"] if assumed else ()))


def _weights_share(task: Task, values: Mapping[str, KnobValue]) -> float:
    if pair := values.get(PREFILL_DECODE):
        devices = min(each.devices for each in language(roles(str(pair))))
    else:
        devices = math.prod(count(values, knob) for knob in (TP, PP, DP))
    return weight_bytes(task) / devices / Hardware.of(task).memory_bytes
