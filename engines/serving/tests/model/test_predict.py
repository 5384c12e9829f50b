"""Predictions of servers: what knobs and loads do to figures, memory, and the step time of an objective."""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.catalogue import public_model
from flagcore_models.layers import parameters
from flagcore_serving.job import Load, ServeSpec
from flagcore_serving.model import candidates, request_times, simulated_load
from flagcore_serving.model.closed_loop import PARTS
from flagcore_serving.model.predict import crowding, serving_of
from flagcore_serving.model.predict import predict as predict_engine
from flagcore_serving.model.products import linear
from flagcore_serving.model.simulated_load import STEADY_RATIO
from flagcore_serving.model.work import UNFITTED, overheads_of
from flagcore_serving.published import LAYOUT
from flagcore_serving.space.placement import uniform_kinds
from flagcore_serving.space.weights import ATTENTION
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_sglang.engine import RECEIVE
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import predict, published
from flagcore.domain.chip import Fact, Link
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.metrics import LATENCIES, RATES, STATISTICS
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.spec import ClusterSpec, Spec, Task, figure_name, seconds
from flagcore.physics.roofline import PlainMemory, Roofline
from tests.product.serving_inputs import CHIP, DENSE, EXPERTS, LATENT, SOURCE, costs, settings

LOAD = Load(input_len=1024, output_len=128, concurrency=32, num_prompts=64)
GIB = float(1 << 30)
RECIPES = {RECEIVE: 30, "max-prefill-tokens": 32768}


def task(
    *loads: Load, engine: str = "vllm", objective: str = "output_tokens_per_s", model: Model = DENSE, **serve: object
) -> Task:
    group = NodeGroup(chip=CHIP, nodes=1, devices_per_node=8)
    job = ServeSpec(engine=engine, loads=loads or (LOAD,), **{"engine_version": "0.19.0", **serve})  # type: ignore[arg-type]
    spec = Spec(model=model, cluster=ClusterSpec(), work=job, objective=objective)
    return Task(spec=spec, cluster=Cluster(groups=(group,)))


def predicted(on: Task | None = None, **arguments: object) -> Predictions:
    return predict(on or task(), settings(**arguments), costs())


def figure(found: Predictions, name: str = "output_tokens_per_s") -> list[float]:
    return found.figures[name].tolist()


def with_cpus(count: int | None) -> Task:
    return replace(task(), cluster=Cluster(groups=(replace(task().cluster.groups[0], cpus_per_node=count),)))


def test_a_build_can_quantize_attention_that_a_checkpoint_leaves_in_16_bits() -> None:
    on = task(model=replace(EXPERTS, name="zai-org/GLM-5.2"), precision="mxfp4", weights="amd/GLM-5.2-MXFP4")
    found = [
        serving_of(on, Roofline(chip=CHIP), replace(UNFITTED, narrows=narrow)).bytes_of(ATTENTION)
        for narrow in ("", "fp8")
    ]
    assert found == [2.0, 1.0]


def test_intervals_are_wider_in_open_loops_and_over_several_hosts() -> None:
    closed = predicted(tensor=[8, 16])
    burst = predicted(task(replace(LOAD, concurrency=None, request_rate=float("inf"))), tensor=8)
    widths = [*(closed.high_s / closed.low_s), *(burst.high_s / burst.low_s)]
    assert 1.5 < widths[0] < 1.55 < widths[1] < widths[2]


def test_each_group_of_a_pipeline_of_sglang_has_a_share_of_the_sequences() -> None:
    found = predicted(task(engine="sglang", engine_version="0.5.23"), pipeline=[4, 4, 4], max_running=[4, 7, 8])
    assert figure(found)[0] == figure(found)[1] < figure(found)[2]


def test_processes_per_cpu_count_front_ends_schedulers_and_devices() -> None:
    layouts = settings(instances=[1, 8, 1, 1], tensor=[8, 1, 1, 2], data=[1, 1, 8, 1])
    assert crowding(with_cpus(2), uniform_kinds(layouts.instances), layouts).tolist() == [5.0, 12.0, 8.5, 2.0]
    assert np.diff([figure(predicted(with_cpus(each), tensor=8), "tpot_s.p50")[0] for each in (None, 2)]) > 5 * 0.766e-3


def test_an_architecture_may_have_its_own_kernels_of_experts() -> None:
    on, own = task(precision="fp8"), replace(UNFITTED, grouped={CHIP.architecture: {"fp8": {"rows": 32.0}}})
    others = replace(UNFITTED, grouped={"other": own.grouped[CHIP.architecture]})
    assert [serving_of(on, Roofline(chip=CHIP), each).overheads.rows for each in (own, others)] == [32.0, 8.0]


def test_weights_that_are_only_stored_in_4_bits_are_multiplied_in_16_perhaps_slower() -> None:
    on, roofline = task(precision="nvfp4", model=replace(DENSE, name="Qwen/Qwen3.6-27B")), Roofline(chip=CHIP)
    own = replace(UNFITTED, grouped={CHIP.architecture: {"w4a16": {"converted": 0.5}}})
    found = serving_of(on, roofline, own)
    assert (found.precision, found.weight_bytes, found.parts[ATTENTION]) == ("bf16", 0.5625, ("fp8", None, 1.0))
    usual, tokens = found._replace(overheads=UNFITTED), np.array([[1.0, 8192.0]])
    times = [linear(each, roofline, tokens, 5120.0, 5120.0, "dense")[0] for each in (usual, found)]
    assert times[1] - times[0] == pytest.approx([0.0, times[0][1] - times[0][0]])


@pytest.mark.parametrize(
    ("given", "most"), [({}, 2.0), ({"peer_access": False}, 1.0), ({"topology": "switch"}, np.inf)]
)
def test_an_own_all_reduce_on_a_bus_needs_access_between_two_devices(given: dict[str, Any], most: float) -> None:
    link = replace(Link(name="bus", topology="pcie", bytes_per_second=Fact(value=32e9, source=SOURCE)), **given)
    on = task()
    group = replace(on.cluster.groups[0], chip=replace(CHIP, link=link))
    on = replace(on, cluster=Cluster(groups=(group,)))
    assert serving_of(on, Roofline(chip=group.chip), UNFITTED).bus_ranks == most


def test_a_trial_takes_the_time_of_its_requests_at_all_points() -> None:
    points = (LOAD, replace(LOAD, concurrency=4), replace(LOAD, num_prompts=None, is_steady=True))
    on = task(*points, repeats=2, slo={"ttft_s.p99": 1.0})
    found = predicted(on)
    (rate,), (answer_s,) = figure(found, "requests_per_s"), figure(found, "e2e_s.mean")
    expected = 2 * (64 / rate + 64 / min(rate, 4 / answer_s) + (400 + 32) / rate)
    assert VLLM.plans.load_seconds(on, found) == pytest.approx(expected)
    assert np.isnan(VLLM.plans.load_seconds(task(highest="concurrency"), found)).all()


def test_every_figure_of_the_domain_is_predicted() -> None:
    found = predicted()
    names = {*RATES, *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS)}
    parts = {f"time.{part}" for part in PARTS}
    assert set(found.figures) == names | parts | {
        f"kv_cache_{each}" for each in ("bytes", "tokens", "request_bytes", "least_bytes")
    }
    assert all(np.isfinite(values).all() and (values >= 0).all() for values in found.figures.values())
    assert all((found.figures[name] > 0).all() for name in names)
    for name in LATENCIES:
        assert found.figures[f"{name}.p50"] <= found.figures[f"{name}.p90"] <= found.figures[f"{name}.p99"]


def test_a_cache_that_holds_no_longest_request_is_named_with_the_context_that_it_holds() -> None:
    figures = {"kv_cache_bytes": 4 * GIB, "kv_cache_least_bytes": 4.5 * GIB, "kv_cache_tokens": 29_120.0}
    assert "~29,120" in VLLM.plans.shortage(figures)
    assert "29,120" not in VLLM.plans.shortage({**figures, "kv_cache_state_bytes": 4.5 * GIB})  # its sequences need it
    assert not VLLM.plans.shortage({**figures, "kv_cache_bytes": 4.5 * GIB})
    full = {**figures, "kv_cache_bytes": 0.0, "kv_cache_tokens": 0.0}
    assert "0.82" in VLLM.plans.shortage({**full, "kv_cache_enough_share": 0.812})
    assert VLLM.plans.shortage({**full, "kv_cache_enough_share": 1.1}) == VLLM.plans.shortage(full)


@pytest.mark.parametrize(
    "objective", ["output_tokens_per_s", "output_tokens_per_s_per_device", "requests_per_s", "ttft_s.p99", "e2e_s"]
)
def test_step_time_is_the_seconds_of_the_objective(objective: str) -> None:
    found = predicted(task(objective=objective), tensor=[1, 2])
    expected = [seconds(objective, each) for each in figure(found, figure_name(objective))]
    assert found.step_time_s == pytest.approx(expected)
    assert (found.low_s < found.step_time_s).all()
    assert (found.step_time_s < found.high_s).all()


RATE = "output_tokens_per_s"


@pytest.mark.parametrize(
    ("on", "arguments", "name", "low", "high"),
    [
        (task(), {"instances": [1, 2]}, RATE, 1.3, 2.0),
        (task(), {"instances": [1, 2]}, "output_tokens_per_s_per_device", 0.65, 1.0),
        (task(), {"instances": [1, 2]}, "kv_cache_tokens", 2.0, 2.0),
        (task(), {"instances": [4, 1], "pipeline": [1, 4]}, RATE, 0.5, 1.0),  # a prompt in one stage delays the others
        (task(replace(LOAD, concurrency=1, num_prompts=2)), {"pipeline": [1, 2]}, "tpot_s.mean", 0.9999, 3.0),
        (task(), {"tensor": [1, 2]}, "tpot_s.mean", 0.0, 1.0),
        (task(), {"tensor": [1, 2]}, "kv_cache_bytes", 1.01, 2.0),
        (task(), {"tensor": [2, 4]}, "tpot_s.mean", 0.0, 1.0),
        (task(), {"max_running": [256, 4]}, RATE, 0.0, 0.5),
        (task(), {"max_batched_tokens": [8192, 256], "pass_tokens": [8192, 256]}, RATE, 0.0, 1.0),
        (task(), {"graph_tokens": [512, 0]}, RATE, 0.0, 0.7),
        (task(), {"max_running": [64, 512], "block_size": [16, 128]}, RATE, 1.0, 1.0),  # limits out of reach
        (
            *(task(replace(LOAD, input_len=128, prefix_len=2048)), {"prefix_caching": [0, 1], "context_len": 4096}),
            *("ttft_s.mean", 0.0, 0.5),
        ),
        (task(precision="fp8", model=EXPERTS), {"data": [1, 4], "expert": [1, 4]}, RATE, 1.0, 4.0),
    ],
)
def test_knobs_change_a_figure_by_a_factor(
    on: Task, arguments: dict[str, list[int]], name: str, low: float, high: float
) -> None:
    before, after = figure(predicted(on, **arguments), name)
    assert after / before == pytest.approx(low) if low == high else low < after / before < high


def test_hosts_with_few_cpus_are_slower() -> None:
    found = [predicted(with_cpus(count), tensor=8) for count in (None, 10, 5, 2)]
    rates, latencies = ([figure(each, name)[0] for each in found] for name in (RATE, "ttft_s.mean"))
    assert rates[0] == rates[1] > 1.2 * rates[2] > 1.2 * rates[3]
    assert latencies[3] > 2.0 * latencies[1]


def test_a_burst_waits_longer_for_its_first_tokens_than_a_few_clients() -> None:
    burst = task(replace(LOAD, concurrency=None, request_rate=float("inf")))
    few = task(replace(LOAD, concurrency=4))
    assert figure(predicted(burst), "ttft_s.p50")[0] > 5 * figure(predicted(few), "ttft_s.p50")[0]


@pytest.mark.parametrize(("rate", "count"), [(2.0, 64), (5.0, None)])
def test_requests_that_come_slowly_are_answered_as_they_come(rate: float, count: int | None) -> None:
    slow = task(replace(LOAD, concurrency=None, request_rate=rate, num_prompts=count))
    assert figure(predicted(slow), "requests_per_s")[0] == pytest.approx(rate, rel=0.1)


def test_the_best_load_that_meets_the_limit_is_used_or_the_nearest_one() -> None:
    loads = [replace(LOAD, concurrency=clients, num_prompts=4 * clients) for clients in (4, 16, 64)]
    lightest, middle, heaviest = (predicted(task(each)) for each in loads)
    limit = 1.01 * figure(middle, "tpot_s.p99")[0]
    assert figure(predicted(task(*loads))) == figure(heaviest)
    assert figure(predicted(task(*loads, slo={"tpot_s.p99": limit}))) == figure(middle)
    assert figure(predicted(task(*loads, slo={"ttft_s.p99": 1e-6}))) == figure(lightest)


@pytest.mark.parametrize(
    ("key", "base"),
    [
        ("concurrency", replace(LOAD, concurrency=1000, num_prompts=100)),
        ("request_rate", replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=100)),
    ],
)
def test_the_highest_load_within_the_limits_is_a_figure(key: str, base: Load) -> None:
    limit = figure(predicted(), "tpot_s.p99")[0]
    tight, loose, impossible = (
        predicted(task(base, slo={"tpot_s.p99": factor * limit}, highest=key)) for factor in (1.0, 2.0, 1e-6)
    )
    assert figure(impossible, "highest_load")[0] <= 1 <= figure(tight, "highest_load")[0]
    assert figure(tight, "highest_load")[0] < figure(loose, "highest_load")[0]
    assert figure(tight, "tpot_s.p99")[0] <= limit < figure(impossible, "tpot_s.p99")[0] / 1e-6
    assert "highest_load" not in predicted().figures


@pytest.mark.parametrize(("limited", "max_running", "longest_s"), [("ttft_s.p99", 512, 1.0), ("tpot_s.p99", 4, 99.0)])
def test_instances_keep_up_with_the_highest_rate(limited: str, max_running: int, longest_s: float) -> None:
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=128, least_s=10.0)
    slo, kinds = {limited: 1.0}, {"instances": 8, "max_running": max_running}
    (rate,) = figure(predicted(task(load, slo=slo, highest="request_rate"), **kinds), "highest_load")
    for_long = predicted(task(replace(load, request_rate=rate, num_prompts=20000, least_s=0.0), slo=slo), **kinds)
    assert figure(for_long, "requests_per_s")[0] > 0.95 * rate
    assert figure(for_long, "ttft_s.p99")[0] < longest_s
    candidates._known.clear()
    predicted(task(load, slo={"ttft_s.p99": 1e-6}, highest="request_rate"), **kinds)
    assert sum(map(len, candidates._known.values())) == 3  # alone, and at the lowest rate: no search


def test_the_highest_rates_of_candidates_do_not_depend_on_each_other() -> None:
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=100)
    searched = task(load, slo={"ttft_s.p99": 2.0, "tpot_s.p99": 0.05}, highest="request_rate")
    arguments = {"tensor": [8, 4, 1, 1], "instances": [1, 2, 8, 1], "max_running": [256, 256, 64, 64]}
    together = figure(predicted(searched, **arguments), "highest_load")
    for row in range(4):
        one = {name: [values[row]] for name, values in arguments.items()}
        alone = figure(predicted(searched, **one), "highest_load")
        assert together[row] == pytest.approx(alone[0], rel=0.06)


def test_a_search_that_stops_simulations_finds_the_same_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=300)
    arguments = {"tensor": [8, 4, 1], "instances": [1, 2, 8], "max_running": [256, 256, 64]}
    limits = {"ttft_s.p99": 1.0}, {"tpot_s.p90": 0.02}, {"e2e_s.p50": 2.0, "ttft_s.mean": 0.5}, {"ttft_s.p99": 1e-6}
    found = list[dict[str, list[float]]]()
    for stops in (True, False):
        if not stops:
            monkeypatch.setattr(request_times.SimulationCheck, "has_failed", lambda *_: False)
        for slo in limits:
            candidates._known.clear()
            metrics = predicted(task(load, slo=slo, highest="request_rate"), **arguments).figures
            found.append({name: values.tolist() for name, values in metrics.items()})
    assert found[: len(limits)] == found[len(limits) :]


def test_a_search_for_the_best_alone_finds_the_best_with_fewer_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=300)
    arguments = {"tensor": [4, 8, 1, 2], "instances": [2, 1, 8, 4], "max_running": [256, 256, 64, 64]}
    slo, found, simulated = {"ttft_s.p99": 1.0, "tpot_s.p99": 0.03}, list[np.ndarray](), list[int]()
    for only_best in (False, True):
        monkeypatch.setattr(candidates, "_known", {})
        on = task(load, slo=slo, highest="request_rate", only_best=only_best)
        found.append(predicted(on, **arguments).figures["highest_load"])
        simulated.append(sum(map(len, candidates._known.values())))
    every, bounds = found
    is_best = every == every.max()
    assert (bounds[is_best] == every.max()).all()
    assert (bounds[~is_best] < every.max()).all()
    assert is_best.sum() < is_best.size
    assert simulated[1] < simulated[0]


def test_no_highest_rate_is_searched_where_no_request_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_known", {})
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=300)
    on = task(load, slo={"ttft_s.p99": 1.0}, highest="request_rate")
    found = predict(on, settings(memory_fraction=0.15), costs())
    assert not found.fits.any()
    assert not candidates._known
    assert np.isfinite(found.step_time_s).all()


@pytest.mark.parametrize("only_best", [False, True])
def test_a_closed_form_that_is_far_too_low_hides_no_best_candidate(
    monkeypatch: pytest.MonkeyPatch, only_best: bool
) -> None:
    load = replace(LOAD, concurrency=None, request_rate=1000.0, num_prompts=300)
    closed_form = candidates._in_closed_form

    def inverted(*arguments: Any, **named: Any) -> dict[str, np.ndarray]:
        found = closed_form(*arguments, **named)
        return {**found, "requests_per_s": 1.0 / found["requests_per_s"]}

    monkeypatch.setattr(candidates, "_in_closed_form", inverted)
    on = task(load, slo={"ttft_s.p99": 1.0}, highest="request_rate", only_best=only_best)
    few, many = predicted(on, tensor=8, max_running=[4, 256]).figures["highest_load"]
    assert many > few
    assert many == predicted(on, tensor=8, max_running=[256]).figures["highest_load"][0]


def test_a_latency_of_several_loads_comes_from_the_heaviest() -> None:
    loads = [replace(LOAD, concurrency=each) for each in (1, 8, 32)]
    found = predicted(task(*loads, objective="ttft_s.p99"))
    assert figure(found, "ttft_s.p99") == figure(predicted(task(loads[-1], objective="ttft_s.p99")), "ttft_s.p99")


def test_goodput_counts_requests_that_keep_the_limits() -> None:
    burst = replace(LOAD, concurrency=None, request_rate=float("inf"))
    found = predicted(task(burst, slo={"ttft_s.p99": figure(predicted(task(burst)), "ttft_s.p50")[0]}))
    share = figure(found, "goodput_requests_per_s")[0] / figure(found, "requests_per_s")[0]
    assert share == pytest.approx(0.5, abs=0.15)


def test_a_server_fits_if_its_cache_holds_one_request() -> None:
    assert predicted(context_len=[2048, 400_000]).fits.tolist() == [True, False]
    assert predicted(context_len=400_000, fits_context=[True, False]).fits.tolist() == [True, False]
    assert predict(task(), settings(memory_fraction=[0.9, 0.15]), costs()).fits.tolist() == [True, False]


def test_a_chip_without_facts_has_memory_predictions_but_no_times() -> None:
    bare = replace(costs(), kernels=Roofline(chip=replace(CHIP, dense_flops_per_second={})))
    found = predict(task(), settings(), bare)
    assert np.isnan(found.step_time_s).all()
    assert found.static_bytes[0] > 16e9


def test_a_cache_without_a_limit_sets_no_part_aside_for_states() -> None:
    unlimited = replace(costs(), memory=replace(PlainMemory.of(task().cluster.groups[0]), capacity=None))
    shared, apart = (
        predict(task(model=public_model("Qwen/Qwen3.5-4B")), settings(state_share=share), unlimited)
        for share in (0.0, 0.5)
    )
    assert np.isfinite(shared.device_used_bytes).all()
    assert shared.device_used_bytes == pytest.approx(apart.device_used_bytes)


def test_weights_in_an_unsupported_format_are_read_unchanged() -> None:
    wide, four = predicted(), predicted(task(precision="nvfp4"))
    assert figure(four, "tpot_s.p50")[0] < figure(wide, "tpot_s.p50")[0]
    assert four.static_bytes[0] <= wide.static_bytes[0] * 1.001
    assert figure(four, "kv_cache_tokens")[0] > figure(wide, "kv_cache_tokens")[0]


def test_weights_in_a_narrow_file_are_as_large_as_in_the_file(tmp_path: Path) -> None:
    file, bare = tmp_path / "weights.gguf", task(engine="llamacpp")
    reported = task(engine="llamacpp", weights=str(file))

    def stored(bytes_each: float) -> Predictions:
        with file.open("wb") as weights:
            weights.truncate(int(parameters(DENSE) * bytes_each))
        return predicted(reported, cache_bytes=1e9)

    without_file = predicted(bare, cache_bytes=1e9)
    assert stored(2.0).static_bytes == without_file.static_bytes
    assert figure(stored(2.0)) == figure(without_file)
    assert stored(0.56).static_bytes[0] < 0.5 * without_file.static_bytes[0]
    assert figure(stored(0.56), "tpot_s.p50")[0] < 0.7 * figure(without_file, "tpot_s.p50")[0]


def test_releases_have_different_overheads() -> None:
    known = {each: overheads_of(VLLM.program.overheads, each) for each in ("0.20.2", "0.12", None, "0.33")}
    assert known["0.20.2"].iteration < known["0.12"].iteration
    assert known[None] == known["0.33"]
    assert not overheads_of(SGLANG.program.overheads, "0.5.9").mixes
    # the first with `ignore_eos` in `_get_running_request_total_token_offset` (schedule_policy.py)
    sglang = [overheads_of(SGLANG.program.overheads, each) for each in ("0.5.21", "0.5.22")]
    assert [(each.reserve, each.reserve_of_ranks) for each in sglang] == [(0.7, 0.3), (1.0, 1.0)]
    entries = [overheads_of(VLLM.program.overheads, each).entry for each in ("0.9.1", "0.10.2", "0.11.0", "0.11.1")]
    harmony = task(model=replace(DENSE, name="gpt-oss-20b"), engine_version="0.11.0")
    assert entries == [8.2e-3, VLLM.overheads_for(harmony).entry, 8.2e-3, 2e-3]
    assert overheads_of(VLLM.program.overheads, "atom 0.1") == VLLM.overheads_for(
        task(engine_version="atom bf9b133e"), on_chip={"attention": 1.0}
    )
    assert not overheads_of(VLLM.program.overheads, "atom").mixes
    assert overheads_of(VLLM.program.overheads, "vllm + atom").mixes
    bare = copy(VLLM)
    bare.program, bare.host_times = replace(VLLM.program, overheads={}), None
    assert overheads_of({}, "0.5.9") == bare.overheads_for(task(), on_host=True) == UNFITTED
    assert VLLM.overheads_for(task(), on_chip={"outside": None}).outside == UNFITTED.outside


def test_whole_prompts_in_iterations_of_their_own_do_not_delay_answers() -> None:
    burst = task(Load(input_len=2000, output_len=100, request_rate=float("inf"), num_prompts=64), model=DENSE)
    kinds = settings(tensor=8, max_batched_tokens=2048, context_len=8192)
    mixed, whole = (
        predict_engine(burst, kinds, costs(), VLLM.overheads_for(burst, on_chip={"whole_unless_latent": each}))
        for each in (False, True)
    )
    assert figure(whole, "itl_s.p90")[0] < 0.5 * figure(mixed, "itl_s.p90")[0]
    assert VLLM.overheads_for(task(model=LATENT), on_chip={"whole_unless_latent": True}).mixes


def test_a_host_that_also_computes_pays_for_scheduling() -> None:
    own = replace(costs(), synchronous=True)
    beside = predicted(graph_tokens=[512, 0])
    found = predict(task(), settings(graph_tokens=[512, 0]), own)
    assert figure(found, "tpot_s.p50")[0] > figure(beside, "tpot_s.p50")[0]
    assert figure(found)[1] < figure(found)[0]


def fp4_task(engine: str, **serve: object) -> Task:
    rates = {**CHIP.dense_flops_per_second, "fp4": CHIP.memory_bytes}
    chip = replace(CHIP, architecture="sm_100", dense_flops_per_second=rates)  # type: ignore[arg-type]
    built = task(engine=engine, **serve)
    return replace(built, cluster=Cluster(groups=(NodeGroup(chip=chip, nodes=1, devices_per_node=8),)))


@pytest.mark.parametrize(
    ("made", "values", "expected"),
    [
        (fp4_task("vllm", precision="fp8"), {}, {"kv_cache_type": "fp8"}),
        (fp4_task("vllm", precision="bf16"), {}, {}),
        (fp4_task("vllm", precision="fp8"), {"kv_cache_type": "auto"}, {"kv_cache_type": "auto"}),
        (task(precision="fp8"), {}, {}),
    ],
)
def test_published_servers_have_an_8_bit_cache_on_4_bit_chips(
    made: Task, values: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    assert published(made, values)[1] == expected


def test_published_servers_without_a_release_have_a_release_of_their_date() -> None:
    assert published(task(engine_version=None), {})[0].spec.serve.engine_version == "0.17.0"
    assert published(task(engine_version="0.33.0"), {})[0].spec.serve.engine_version == "0.33.0"


@pytest.mark.parametrize(
    ("lengths", "count", "flags", "ratio"),
    [
        ((1024, 1024), None, RECIPES, STEADY_RATIO),
        ((1024, 1024), 320, RECIPES, STEADY_RATIO),
        ((1024, 1024), 64, {}, 1.0),
        ((1000, 1000), 64, {}, 0.0),
        ((1000, 1000), None, {}, 1.0),
    ],
)
def test_lengths_of_published_runs_have_the_range_and_the_flags_of_their_client(
    lengths: tuple[int, int], count: int | None, flags: Mapping[str, int], ratio: float
) -> None:
    load = Load(input_len=lengths[0], output_len=lengths[1], concurrency=32, num_prompts=count)
    serve = published(task(load, engine="sglang"), {})[0].spec.serve
    assert (serve.engine_args, serve.loads[0].range_ratio) == (flags, ratio)
    graphs = published(task(load, model=replace(EXPERTS, name="openai/gpt-oss-120b")), {})[0].spec.serve.engine_args
    assert ("max-cudagraph-capture-size" in graphs) is bool(flags)


@pytest.mark.parametrize(
    ("version", "source", "lengths", "expected"),
    [
        ("0.5.6.post2", "aiconfigurator-core 0.12.0", (1000, 100), True),
        ("0.5.1.post1", "aiconfigurator silicon_sample.csv", (1000, 100), None),
        ("0.5.6.post2", "lmsys.org", (1000, 100), None),
        ("0.5.9", "aiconfigurator-core 0.12.0", (1024, 1024), None),
    ],
)
def test_generated_servers_mix_prompts_and_decoding(
    version: str, source: str, lengths: tuple[int, int], expected: bool | None
) -> None:
    load = Load(input_len=lengths[0], output_len=lengths[1], concurrency=20, num_prompts=None)
    made = task(load, engine="sglang", engine_version=version)
    _, values, noted, warnings = SGLANG.published(made, {}, source)
    assert (values.get("enable_mixed_chunk"), noted) == (expected, {"enable_mixed_chunk"} if expected else set())
    assert any("aiconfigurator" in each for each in warnings) is bool(expected)
    for sizes in ((16, 1, 4), (4, 4, 16)):
        values = VLLM.published(made, dict(zip(LAYOUT, sizes, strict=True)), source)[1]
        assert tuple(values[name] for name in LAYOUT) == ((4, 1, 4) if "aiconfigurator" in source else sizes)


@pytest.mark.parametrize(("source", "expected"), [("InferenceX experimental", 2), ("", None)])
def test_a_job_that_asks_for_no_cpus_gets_one_core(source: str, expected: int | None) -> None:
    made = task(LOAD)
    found, _, _, warnings = VLLM.published(made, {}, source)
    assert found.cluster.groups[0].cpus_per_node == expected
    assert any("cpus_per_node" in each for each in warnings) is bool(expected)
    group = replace(made.cluster.groups[0], cpus_per_node=64)
    known = replace(made, cluster=replace(made.cluster, groups=(group,)))
    assert VLLM.published(known, {}, source)[0].cluster == known.cluster


def test_prompts_that_come_first_keep_requests_of_equal_length_in_step() -> None:
    endless = replace(LOAD, num_prompts=None)
    equal = predicted(task(endless, engine="sglang"), mixed_chunks=np.array([False, True]))
    spread = predicted(task(replace(endless, range_ratio=0.8), engine="sglang"))
    in_step, mixed, apart = *figure(equal, "ttft_s.mean"), *figure(spread, "ttft_s.mean")
    assert in_step > mixed > 1.5 * apart, "the chunks of an iteration stay together"
    assert figure(equal, "tpot_s.mean")[0] < 0.95 * figure(spread, "tpot_s.mean")[0]


def test_a_candidate_is_simulated_once_for_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_known", {})
    monkeypatch.setattr(candidates, "MAX_KNOWN", 2)
    found = predicted(max_running=[16, 32])
    loaded = predicted(task(replace(LOAD, seed=1)), max_running=[16])
    assert sum(map(len, candidates._known.values())) == 1
    again = predicted(max_running=[32])
    monkeypatch.setattr(candidates, "_simulated", None)
    assert (figure(predicted(max_running=[32])), figure(again)) == (figure(again), figure(found)[1:])
    assert figure(predicted(task(replace(LOAD, seed=1)), max_running=[16])) == figure(loaded)


@pytest.mark.parametrize(
    ("limit", "values", "others", "simulated"),
    [
        ("max_running", [1, 64, 96, 128], {"graph_tokens": [0]}, {None: 2, 5.0: 2}),
        ("max_batched_tokens", [512, 1024, 4096, 8192, 16384], {}, {None: 5, 5.0: 3}),
        ("cache_bytes", [2e8, 2e9, 4e9, 8e9], {}, {None: 2, 5.0: 2}),
        ("graph_tokens", [1, 16, 1024, 2048], {}, {None: 2, 5.0: 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [None, 5.0])
def test_candidates_that_do_not_reach_a_limit_share_a_simulation(
    monkeypatch: pytest.MonkeyPatch,
    rate: float | None,
    limit: str,
    values: list[float],
    others: dict[str, Any],
    simulated: dict[float | None, int],
) -> None:
    on, alone = task(replace(LOAD, concurrency=None if rate else 8, request_rate=rate)), list[tuple[float, ...]]()
    names = ("requests_per_s", "ttft_s.p99", "tpot_s.p99", "itl_s.p99", "e2e_s.mean")
    for each in values:
        monkeypatch.setattr(candidates, "_known", {})
        found = predicted(on, **{limit: [each]}, **others)
        alone += zip(*(figure(found, name) for name in names), strict=True)
    monkeypatch.setattr(candidates, "_known", {})
    found = predicted(on, **{limit: values}, **{name: each * len(values) for name, each in others.items()})
    assert sum(map(len, candidates._known.values())) == simulated[rate]
    assert [*zip(*(figure(found, name) for name in names), strict=True)] == alone
    assert len({*alone}) > 1


def test_in_a_large_space_only_the_best_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = np.arange(1, 41)
    all_simulated = predicted(max_running=limits)
    monkeypatch.setattr(candidates, "MAX_SIMULATED", 10)
    ranked = predicted(max_running=limits)
    best = np.argsort(all_simulated.step_time_s)[:5]
    assert ranked.step_time_s[best] == pytest.approx(all_simulated.step_time_s[best])
    assert np.isfinite(ranked.step_time_s).all()
    assert np.abs(np.log(ranked.step_time_s / all_simulated.step_time_s)).max() < 0.5
    names = (f"{part}_s.mean" for part in ("ttft", "tpot", "e2e"))
    first, each, whole = (np.delete(ranked.figures[name], best) for name in names)
    assert (first + LOAD.output_len * each >= 0.99 * whole).all()
    assert (whole > first).all()


def test_a_published_server_that_hardly_fits_used_a_larger_memory_share() -> None:
    crowded = task(precision="bf16", engine="sglang", model=replace(EXPERTS, num_layers=30))
    assert published(crowded, {})[0].spec.serve.engine_args["mem-fraction-static"] == 0.95
    assert "mem-fraction-static" not in published(crowded, {"tensor_model_parallel_size": 2})[0].spec.serve.engine_args


def test_an_unlimited_number_of_clients_equals_a_large_one() -> None:
    endless, many = (task(replace(LOAD, num_prompts=count)) for count in (None, 640))
    assert figure(predicted(endless))[0] == pytest.approx(figure(predicted(many))[0], rel=0.15)


def test_a_trace_is_sent_at_its_recorded_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * number, "input_length": 200, "output_length": 20} for number in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = predicted(task(Load(trace=str(trace), num_prompts=None)))
    assert figure(found, "requests_per_s")[0] == pytest.approx(2.0, rel=0.1)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    found = predicted(task(replace(LOAD, output_len=1)))
    assert figure(found, "tpot_s.p99") == figure(found, "itl_s.mean") == [0.0]
    assert figure(found, "e2e_s.p50") == figure(found, "ttft_s.p50")


def test_parts_of_a_requests_time_add_up() -> None:
    crowd = task(replace(LOAD, concurrency=256, num_prompts=512))
    found = predicted(crowd, max_running=[256, 8, 256], tensor=[1, 1, 4]).figures
    total = sum(found[f"time.{part}"] for part in PARTS)
    assert total == pytest.approx(found["e2e_s.mean"])
    assert (found["time.queue_s"] <= found["ttft_s.mean"]).all()
    after = found["e2e_s.mean"] - found["ttft_s.mean"]
    assert (found["time.decode_s"] + found["time.shared_s"] <= after * (1 + 1e-9)).all()
    share = {part: (found[f"time.{part}"] / total).tolist() for part in PARTS}
    assert share["queue_s"][1] > 0.8 > share["queue_s"][0]
    assert share["collectives_s"][:2] == [0.0, 0.0]
    assert share["collectives_s"][2] > 0.0


def test_requests_wait_before_the_first_token_as_little_says_and_alone_they_share_no_step() -> None:
    crowd = predicted(task(replace(LOAD, concurrency=256, num_prompts=2048)), max_running=[8]).figures
    waiting = crowd["time.queue_s"] * crowd["requests_per_s"]
    assert waiting == pytest.approx(256 - 8, rel=0.1)  # Little's law
    (alone,) = (predicted(task(replace(LOAD, concurrency=1))).figures,)
    for part in ("queue_s", "shared_s"):
        assert (alone[f"time.{part}"] <= 0.1 * alone["e2e_s.mean"]).all()
    longer = [predicted(task(replace(LOAD, concurrency=32, input_len=n))).figures["time.shared_s"] for n in (64, 2048)]
    assert longer[0] < longer[1]


def test_an_unbounded_load_costs_at_most_a_fully_simulated_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = {
        "closed loop": replace(LOAD, concurrency=48, num_prompts=5000),
        "burst": replace(LOAD, concurrency=None, request_rate=float("inf"), num_prompts=3000),
        "many clients": replace(LOAD, concurrency=1500, num_prompts=4000),
        "slow": replace(LOAD, concurrency=None, request_rate=10.0, num_prompts=4000),
        "too fast": replace(LOAD, concurrency=None, request_rate=200.0, num_prompts=4000),
    }
    loads = {name: replace(load, input_len=256, output_len=32) for name, load in loads.items()}
    full = {name: predicted(task(load), max_running=[64]).figures for name, load in loads.items()}
    monkeypatch.setattr(simulated_load, "MAX_REQUESTS", 600)
    monkeypatch.setattr(candidates, "_known", {})
    for name, load in loads.items():
        short = predicted(task(load), max_running=[64]).figures
        for figure_of in (RATE, "requests_per_s", "ttft_s.mean", "ttft_s.p99", "tpot_s.p50", "e2e_s.p50"):
            assert short[figure_of][0] == pytest.approx(full[name][figure_of][0], rel=0.06), (name, figure_of)


def test_clients_without_a_free_slot_wait() -> None:
    endless = replace(LOAD, concurrency=3000, num_prompts=None)
    many, few = (predicted(task(replace(endless, concurrency=flight)), max_running=[16]) for flight in (4000, 400))
    assert figure(many)[0] == pytest.approx(figure(few)[0], rel=0.03)
    assert figure(many, "ttft_s.p50")[0] == pytest.approx(10 * figure(few, "ttft_s.p50")[0], rel=0.1)


def test_a_prompt_of_millions_of_tokens_is_priced_quickly() -> None:
    long = task(Load(input_len=10_000_000, output_len=16, concurrency=4, num_prompts=32))
    assert 0 < figure(predicted(long, context_len=[10_000_100]), "ttft_s.p50")[0] < 1e9
