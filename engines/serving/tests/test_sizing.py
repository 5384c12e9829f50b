"""flag size: the fewest devices for a rate, the replicas by hour, and autoscalers. What follows from a trial that ran
out of memory, and which candidates cannot keep the SLO."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_serving import sizing as module
from flagcore_serving.autoscaling import manifest
from flagcore_serving.engine import SloImpossible
from flagcore_serving.model import simulated_load
from flagcore_serving.sizing import Size, Sizing, hours_of, sizing
from flagcore_vllm.engine import ENGINE

from flagcore import estimate
from flagcore.api.inputs import LoadedSpec, SpecLike, changed_spec
from flagcore.domain.metrics import LATENCIES
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Candidate
from flagcore.errors import NothingFits, SpecError, UsageError

SHAPE = {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16, "vocab_size": 32000}
SPEC = {
    "model": SHAPE,
    "cluster": {"chip": "H20", "devices_per_node": 2},
    "serve": {
        "engine": "vllm",
        "profile": {"input_len": 1000, "output_len": 50, "num_prompts": 100, "request_rate": 3000},
        "slo": {"ttft_s": {"p99": 1.0}, "tpot_s": {"p99": 0.05}},
    },
    "auto_tuner": {"space": {"max_num_seqs": [64, 256]}, "baseline": {"tensor_model_parallel_size": 2}},
}
LOADED = LoadedSpec("spec.yaml", SPEC)
PRICES = {"H20": 1.0, "H100": 3.0}


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Loads as long as those of the spec, which take less time."""
    with pytest.MonkeyPatch.context() as patch:
        for each in (module, simulated_load):
            patch.setattr(each, "SEARCHED", 100)
        for name in ("MOST_SEARCHED", "MOST_SUSTAINED"):
            patch.setattr(simulated_load, name, 100)
        yield


@pytest.fixture(scope="module")
def found() -> Sizing:
    return sizing(LOADED, None, None, PRICES)


@pytest.mark.slow
def test_the_best_size_is_the_cheapest_of_all_that_are_predicted_without_idle_devices(found: Sizing) -> None:
    costs = set[float]()
    for chip, price in PRICES.items():
        for devices in (1, 2):
            changes: dict[str, Any] = {"cluster.chip": chip, "cluster.devices_per_node": devices}
            changes |= {"serve.profile.request_rate": "auto", "auto_tuner.baseline": None}
            plan = estimate(changed_spec(LOADED, changes), top=1000)
            best = max((each for each in plan.candidates if "last" not in each), key=lambda each: each["highest_load"])
            used = best["output_tokens_per_s"] / best["output_tokens_per_s_per_device"]
            costs.add(price * used * math.ceil(3000 / best["highest_load"]))
    assert found.best.cost_per_hour == min(costs)
    assert sorted(costs) == [each.cost_per_hour for each in found.sizes]
    for each in found.sizes:
        assert each.devices == each.replicas * each.devices_per_replica <= each.safe_devices
        assert each.rate * each.replicas >= found.rate > each.rate * (each.replicas - 1)
        shares = {"ttft_s.p99": each.ttft_p99_s, "tpot_s.p99": each.limited["tpot_s"]["p99"] / 0.05}
        assert shares[each.nearest_limit] == max(shares.values()) <= 1.0


def estimated(spec: LoadedSpec, size: Size) -> Mapping[str, Any]:
    """The estimate of a size's own candidate, with the keys that `flag size` prints."""
    values = {name: value for name, value in size.candidate.items() if value is not None}
    changes = {"cluster.chip": size.chip, "cluster.devices_per_node": size.devices_per_replica, **size.load}
    return estimate(changed_spec(spec, {**changes, "auto_tuner": {"space": values}})).recommended


@pytest.mark.slow
@pytest.mark.parametrize("number", ["auto", 10])
def test_the_estimate_of_a_size_has_its_rate_and_percentiles(number: str | int) -> None:
    spec = changed_spec(LOADED, {"serve.profile.num_prompts": number, "cluster.devices_per_node": 1})
    best = sizing(spec, None, None, {}).best
    found = estimated(spec, best)
    assert found["highest_load"] == best.rate
    assert {name: found[name]["p99"] for name in best.limited} == {
        name: each["p99"] for name, each in best.limited.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.01, 1.02])
def test_the_number_is_the_smallest_that_is_predicted_to_keep_the_limits(share: float) -> None:
    """Just above a multiple of the highest rate that a search found, which is precise to 5%."""
    limits = {"cluster.devices_per_node": 1, "auto_tuner.baseline": None, "serve.slo.ttft_s": {"p99": 0.2}}
    spec = changed_spec(LOADED, limits)
    rate = 20 * sizing(spec, 1.0, None, {}).best.rate * share
    best = sizing(spec, rate, None, {}).best

    def is_kept(replicas: int) -> bool:
        changes = {"serve.profile.request_rate": rate / replicas, "serve.profile.num_prompts": 100}
        return any("last" not in each for each in estimate(changed_spec(spec, changes), top=100).candidates)

    assert is_kept(best.replicas)
    assert not is_kept(best.replicas - 1)
    assert estimated(spec, best)["ttft_s"]["p99"] == best.ttft_p99_s


@pytest.mark.slow
def test_each_hour_has_the_replicas_for_its_busiest_minutes(tmp_path: Path) -> None:
    trace = tmp_path / "day.jsonl"
    quiet, busy = range(0, 3600, 60), (7200 + number / 10 for number in range(3000))
    rows = [{"timestamp": 1000 * second, "input_length": 10, "output_length": 2} for second in (*quiet, *busy)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    hours = hours_of(str(trace))
    assert [(each.hour, each.requests) for each in hours] == [(0, 60), (1, 0), (2, 3000)]
    assert [each.rate for each in hours] == pytest.approx([5 / 300, 0.0, 10.0])
    day = sizing(LOADED, None, str(trace), {})
    assert day.rate == pytest.approx(10.0)
    assert [each.replicas for each in day.hours] == [1, 1, day.best.replicas]
    trace.write_text(json.dumps({"input_length": 10, "output_length": 2}))
    with pytest.raises(SpecError, match="no arrival times"):
        hours_of(str(trace))


@pytest.mark.slow
def test_an_autoscaler_keeps_the_requests_in_flight_of_a_replica(found: Sizing) -> None:
    best, target = found.best, math.floor(found.best.in_flight)
    assert "prompts of 1,000 and answers of 50 tokens" in found.assumed
    assert "p99 TPOT <= 0.05 s" in found.assumed
    assert best.in_flight == pytest.approx(best.rate * (best.ttft_s + 49 * best.tpot_s), rel=0.2)
    hpa = yaml.safe_load(manifest(found, "hpa", "chat"))["spec"]
    assert hpa["scaleTargetRef"]["name"] == "chat"
    assert hpa["maxReplicas"] == best.replicas
    assert hpa["metrics"][0]["pods"]["target"]["averageValue"] == str(target)
    keda = yaml.safe_load(manifest(found, "keda", "chat"))["spec"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (1, best.replicas)
    assert "vllm:num_requests_running" in keda["triggers"][0]["metadata"]["query"]
    planner = yaml.safe_load(manifest(found, "dynamo", "chat"))
    assert (planner["ttft_ms"], planner["itl_ms"], planner["max_gpu_budget"]) == (1000, 50, best.devices)


@pytest.mark.slow
def test_pods_are_instances(found: Sizing) -> None:
    """A Deployment that `flag export` writes has a pod for each instance of a replica."""
    size = replace(found.best, candidate={"instances": 2}, devices_per_replica=8, replicas=3, in_flight=65.0)
    two = replace(found, sizes=(size,))
    spec = yaml.safe_load(manifest(two, "hpa", "chat"))["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    assert spec["metrics"][0]["pods"]["target"]["averageValue"] == "32"
    planner = yaml.safe_load(manifest(two, "dynamo", "chat"))
    assert (planner["decode_engine_num_gpu"], planner["max_gpu_budget"]) == (4, 24)
    apart = replace(found, sizes=(replace(size, candidate={"prefill_decode": "2xtp2+1xtp4"}),))
    planner = yaml.safe_load(manifest(apart, "dynamo", "chat"))
    assert [planner[f"{kind}_engine_num_gpu"] for kind in ("prefill", "decode")] == [2, 4]
    assert [planner[f"{kind}_min_endpoint"] for kind in ("prefill", "decode")] == [2, 1]
    for each, target in ((apart, "hpa"), (replace(two, engine="llamacpp"), "dynamo")):
        with pytest.raises(UsageError):
            manifest(each, target, "chat")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"serve.profile.request_rate": "auto"}, "--rate"),
        ({"serve": None}, "no section serve"),
        ({"serve.slo": {}}, "--ttft-p99"),
        ({"auto_tuner.baseline.context_len": "x"}, "auto_tuner.baseline.context_len"),
        ({"cluster.nodes": "x"}, "cluster.nodes"),
        ({"cluster.devices_per_node": 0}, "cluster.devices_per_node"),
        ({"serve.profile": [1]}, "--rate"),
        ({"serve.profile.request_rate": math.nan}, "at most"),
    ],
)
def test_what_cannot_be_sized_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises((SpecError, UsageError), match=key):
        sizing(changed_spec(LOADED, changes), None, None, {})


@pytest.mark.parametrize("ask", [estimate, lambda spec: sizing(spec, None, None, {})])
def test_servers_on_several_kinds_of_nodes_are_refused(ask: Callable[[SpecLike], object]) -> None:
    with pytest.raises(SpecError) as error:
        ask(changed_spec(LOADED, {"cluster": {"groups": [{"chip": "H20"}, {"chip": "A100"}]}}))
    assert (error.value.key, error.value.value) == ("cluster.groups", "H20, A100")
    assert "cluster.chip" in error.value.fix


@pytest.mark.slow
def test_a_search_for_the_highest_load_does_not_advise_a_lower_one() -> None:
    with pytest.raises(NothingFits, match="the closest has") as error:
        sizing(changed_spec(LOADED, {"serve.slo": {"ttft_s": {"p99": 1e-4}}}), 1.0, None, {})
    assert "lower the load" not in str(error.value)


def test_a_change_that_fits_is_sought_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought = list[int]()
    change = "flagcore.api.commands.estimate.cheapest_change"
    monkeypatch.setattr(change, lambda problem, _: str(sought.append(problem.task.cluster.devices) or "more nodes"))
    with pytest.raises(NothingFits, match="; more nodes"):
        sizing(changed_spec(LOADED, {"model": {**SHAPE, "hidden_size": 65536}}), 1.0, None, {})
    assert sought == [2]


@pytest.mark.slow
def test_each_chip_on_which_nothing_fits_is_named() -> None:
    def planned(spec: LoadedSpec, **_change: Any) -> Any:
        raise NothingFits(f"{spec.data['cluster']['devices_per_node']} are too few")

    with pytest.raises(NothingFits) as error:
        module.sizes_of(LOADED, 1.0, {"H100": None, "A100": None}, planned)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["H100", "A100"]


def test_a_run_that_measured_a_replica_replaces_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = {"instances": 1, "max_num_seqs": 64}
    latency = {"mean": 0.5, "p50": 0.4, "p99": 0.9}
    figures = {"output_tokens_per_s": 500.0, "requests_per_s": 10.0, **dict.fromkeys(LATENCIES, latency)}

    def trial(number: int, highest: float) -> dict[str, Any]:
        measured = {"figures": {**figures, "highest_load": highest}}
        return {"number": number, "candidate": candidate, "state": "measured", "measured": measured}

    def run(best: Any, **trials: Any) -> Sizing:
        other = {"number": 0, "candidate": {**candidate, "max_num_seqs": 256}}
        result = {"chip": "H20", "devices": 2, "best": best, "baseline": other, **trials}
        monkeypatch.setattr("flagcore_serving.sizing.read_result", lambda folder: result)
        return sizing(changed_spec(LOADED, {"cluster.price_per_device_hour": 1.0}), 100.0, None, {}, Path("run"))

    found = run(trial(1, 10.0), trials=[trial(1, 10.0)], repeats=[trial(2, 9.0), trial(3, 11.0)]).best
    assert (found.rate, found.low_rate, found.replicas, found.devices, found.safe_devices) == (10.0, 9.0, 10, 20, 24)
    assert (found.in_flight, found.configuration, found.cost_per_hour) == (5.0, "max_num_seqs 64", 20.0)
    with pytest.raises(UsageError, match="request_rate: auto"):
        run(None, trials=[trial(1, 10.0)])
    with pytest.raises(UsageError, match="--rate auto"):  # its limits are those of the run
        sizing(changed_spec(LOADED, {"serve.slo": {}}), 100.0, None, {}, Path("run"))


def columns(**values: list[int]) -> dict[str, Any]:
    return {knob: np.array(codes) for knob, codes in values.items()}


@pytest.mark.parametrize(
    ("values", "failed", "expected"),
    [
        # more sequences never need less memory
        (
            {"max_num_seqs": [32, 64, 128, 128], "instances": [1, 1, 1, 2]},
            {"max_num_seqs": 64, "instances": 1},
            [False, True, True, False],
        ),
        # graphs need at least as much memory as eager mode
        ({"enforce_eager": [0, 1]}, {"enforce_eager": True}, [True, True]),
        ({"enforce_eager": [0, 1]}, {"enforce_eager": False}, [True, False]),
        # an unset knob and words have no order
        ({"max_num_seqs": [0, 64]}, {"max_num_seqs": None}, [True, False]),
        ({"max_num_seqs": [0]}, {"max_num_seqs": 8}, [False]),
        ({"kv_cache_type": [1, 2]}, {"kv_cache_type": "f16"}, [False, False]),
    ],
)
def test_candidates_that_need_at_least_as_much_memory(values: Any, failed: Any, expected: list[bool]) -> None:
    assert ENGINE.needs_at_least(columns(**values), Candidate.of(failed)).tolist() == expected


def test_a_schedulers_knobs_have_no_order_in_time() -> None:
    assert not ENGINE.takes_at_least(columns(max_num_seqs=[1, 64]), Candidate.of({"max_num_seqs": 1})).any()


@pytest.mark.parametrize(
    ("limit", "low", "pruned"),
    [
        ("ttft_s.p99", 0.9, [False, False, True, False]),
        ("ttft_s.p99", 0.5, [False] * 4),
        ("itl_s.p99", 0.9, [False] * 4),  # it is not predicted
    ],
)
def test_only_candidates_that_certainly_break_the_slo_are_pruned(limit: str, low: float, pruned: list[bool]) -> None:
    ttft = [0.5, 2.4, 2.6 if low == 0.9 else 3.9, float("nan")]
    seconds, zeros = np.ones(len(ttft)), np.zeros(len(ttft))
    predictions = Predictions(
        step_time_s=seconds,
        low_s=seconds * low,
        high_s=seconds / low,
        time_s={},
        static_bytes=zeros,
        activation_bytes=zeros,
        peak_allocated_bytes=zeros,
        reserved_bytes=zeros,
        device_used_bytes=zeros,
        worst_stage=zeros.astype(np.int64),
        capacity_bytes=None,
        model_flops=0.0,
        figures={"ttft_s.p99": np.array(ttft)},
    )
    assert SloImpossible({limit: 1.0}).prunes(columns(parallel=[1, 2, 3, 4]), predictions).tolist() == pruned
