"""Goodput: the section `job`, the bytes of checkpoints, the losses of a job, and the ranking of candidates."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from flagcore_goodput.command import goodput, goodput_command
from flagcore_goodput.goodput import best_interval, crossing, share_of_work, waiting_share, young_interval
from flagcore_goodput.job import PUBLISHED

from flagcore import api
from flagcore.api.inputs import read_spec, without_budget
from flagcore.errors import NothingFits, SpecError, UsageError

DAY, HOUR = 86_400.0, 3_600.0
SIZES = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
MODEL = {**SIZES, "num_query_groups": 8, "vocab_size": 128256}
"""The shape of Llama 3.1 8B."""
WEIGHTS = 8_030_261_248
SPACE = {"tensor_model_parallel_size": [1, 2], "pipeline_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]}
KNOWN = {
    "device_mtbf": "rsc-1",
    "restart_time": "10min",
    "storage_bytes_per_second": 20e9,
    "rank_bytes_per_second": 1e9,
}


def spec(job: Mapping[str, Any] | None = KNOWN, **changes: Any) -> dict[str, Any]:
    """A job on 64 devices."""
    data: dict[str, Any] = {
        "model": MODEL,
        "cluster": {"chip": "H100-SXM", "nodes": 8, "devices_per_node": 8},
        "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 256, "precision": "bf16"},
        "auto_tuner": {"space": {**SPACE, "context_parallel_size": 1, "use_recompute": False}},
    }
    return data | changes | ({} if job is None else {"job": job})


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (None, "job"),
        ([], "job"),
        ("3 weeks", "job"),
        ({"token": 1e12}, "job.token"),
        ({"tokens": "1T"}, "job.tokens"),
        ({"tokens": -1}, "job.tokens"),
        ({"tokens": 0}, "job.tokens"),
        ({"tokens": 1e30}, "job.tokens"),
        ({"tokens": True}, "job.tokens"),
        ({"tokens": 1e12, "days": 3}, "job.days"),
        ({"days": 0}, "job.days"),
        ({"days": "3d"}, "job.days"),
        ({"device_mtbf": "llama-3"}, "job.device_mtbf"),
        ({"device_mtbf": "0h"}, "job.device_mtbf"),
        ({"device_mtbf": 50677}, "job.device_mtbf"),
        ({"restart_time": 600.0}, "job.restart_time"),
        ({"device_mtbf": "50000 hours"}, "job.device_mtbf"),
        ({"restart_time": "soon"}, "job.restart_time"),
        ({"restart_time": [600]}, "job.restart_time"),
        ({"storage_bytes_per_second": 5}, "job.storage_bytes_per_second"),
        ({"storage_bytes_per_second": "2 tons/s"}, "job.storage_bytes_per_second"),
        ({"spare_nodes": -1}, "job.spare_nodes"),
        ({"spare_nodes": 1.5}, "job.spare_nodes"),
        ({"process_failures": 50}, "job.process_failures"),
        ({"saves": "async"}, "job.saves"),
        ({"saves": []}, "job.saves"),
        ({"saves": ["fast"]}, "job.saves[0]"),
        ({"saves": ["memory"]}, "job.process_failures"),
        ({"save_interval": 0}, "job.save_interval"),
        ({"save_interval": "100 steps"}, "job.save_interval"),
    ],
)
def test_an_odd_job_is_one_message_with_its_key(job: Any, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec({**spec(None), "job": job})
    assert [each.key for each in caught.value.problems] == [key]
    assert "\n" not in str(caught.value)


def test_only_training_has_a_job_and_only_ways_of_its_engine() -> None:
    served = {"model": MODEL, "cluster": {"chip": "H100-SXM"}, "serve": {"engine": "vllm"}, "job": KNOWN}
    torchtitan = {**spec(None)["train"], "engine": "fsdp2"}
    for data, key in ((served, "job"), (spec({"saves": ["sync"]}, train=torchtitan, auto_tuner={}), "job.saves")):
        with pytest.raises(SpecError) as caught:
            read_spec(data)
        assert caught.value.key == key
    served.pop("job")
    with pytest.raises(UsageError, match="has no section train"):
        goodput(served)


def test_a_changed_job_does_not_keep_a_run_from_being_resumed() -> None:
    assert without_budget(spec({"tokens": 1e12})) == without_budget(spec(None))
    assert read_spec(spec()) == read_spec(spec(None))


MTBF = 10.0 * HOUR


@pytest.mark.parametrize("hold_s", [1.0, 60.0, 600.0])
def test_the_best_interval_is_that_of_a_search(hold_s: float) -> None:
    hold, intervals = np.array([hold_s]), np.geomspace(10.0, 50.0 * HOUR, 20_000)
    best = intervals[np.argmax(share_of_work(intervals, hold, MTBF, np.array([300.0])))]
    assert best_interval(hold, MTBF)[0] == pytest.approx(best, rel=0.01)
    assert young_interval(hold, MTBF)[0] == pytest.approx(best, rel=0.1)
    assert best_interval(np.array([3.0 * MTBF]), MTBF)[0] == MTBF


@pytest.mark.parametrize(("hold_s", "late_s", "restart_s"), [(60.0, 0.0, 600.0), (1.0, 400.0, 60.0), (300.0, 0.0, 1.0)])
def test_the_share_of_work_is_that_of_simulated_failures(hold_s: float, late_s: float, restart_s: float) -> None:
    """`late_s`: the time of the writes in the background, which does not exceed that of an interval."""
    interval, random = 1_500.0, np.random.default_rng(7)
    work = spent = 0.0
    for alive in random.exponential(MTBF, 20_000):
        if alive > restart_s:  # a save counts if it is written before the failure
            work += interval * max(0, int((alive - restart_s - late_s) // (interval + hold_s)))
        spent += alive
    found = share_of_work(np.array([interval]), np.array([hold_s]), MTBF, np.array([restart_s + late_s]))
    assert found[0] == pytest.approx(work / spent, rel=0.01)


@pytest.mark.parametrize("spares", [0, 1, 4])
def test_waiting_is_that_of_simulated_repairs(spares: int) -> None:
    rate, repair_s, random = 1.0 / DAY, 2.0 * DAY, np.random.default_rng(3)
    starts = np.cumsum(random.exponential(1.0 / rate, 20_000))
    times = np.linspace(100.0 * DAY, starts[-1], 50_000)
    broken = np.searchsorted(starts, times) - np.searchsorted(np.sort(starts + repair_s), times)
    assert waiting_share(spares, rate, repair_s) == pytest.approx(np.mean(broken > spares), abs=0.02)
    assert waiting_share(200, rate, repair_s) == 0.0
    assert waiting_share(10, rate, 1e9) == 1.0


PUBLISHED_RUNS = {
    # 384 A100 from 2022-03-18 (step 12,695) to 07-04 (94,767); steps of 105.2 s, saves of 40 s every 100 steps; 23
    # failures (1 to 2 a week), and 4 incidents that cost 42 h: bigscience e726b159, train/tr11-176B-ml/chronicles.md
    "BLOOM": (100 * 105.22, 40.0, 108 * DAY / 27, 42 * HOUR / 27, 82_072 * 105.22 / (108 * DAY)),
    # arXiv 2402.15627, section 6: over 100 restarts in "several weeks", taken as four; 10 minutes until a failure is
    # noticed and diagnosed, and 15 until the lost work is done again, half of an interval; more than 90%
    "MegaScale": (1_800.0, 1.0, 28 * DAY / 100, 600.0, 0.9),
    # arXiv 2410.21680, its estimate for N nodes: (1 - N r (u + dt / 2)) / (1 + w / dt), r = 6.5 in 1000 days
    **{
        f"{nodes} nodes of RSC-1": (
            *(900.0, 30.0, DAY / (0.0065 * nodes), 300.0),
            (1.0 - 0.0065 * nodes / DAY * (300.0 + 450.0)) / (1.0 + 30.0 / 900.0),
        )
        for nodes in (256, 1024)
    },
}


@pytest.mark.parametrize("run", PUBLISHED_RUNS)
def test_the_progress_of_published_runs(run: str) -> None:
    interval_s, hold_s, mtbf_s, restart_s, published = PUBLISHED_RUNS[run]
    found = share_of_work(np.array([interval_s]), np.array([hold_s]), mtbf_s, np.array([restart_s]))
    assert found[0] == pytest.approx(published, rel=0.05)


def test_published_rates_are_those_of_their_sources() -> None:
    hours = {name: each["hours"] for name, each in PUBLISHED.items()}
    assert hours["llama3-405b"] == pytest.approx(54 * 24 * 16384 / 419, abs=1)
    assert 24 / hours["rsc-1"] * 8 * 1000 == pytest.approx(6.5, abs=0.01)
    assert 24 / hours["rsc-2"] * 8 * 1000 == pytest.approx(2.34, abs=0.01)
    assert hours["rsc-1"] / 16384 == pytest.approx(1.8, abs=0.01)  # the paper's own projection


@pytest.mark.parametrize(
    ("precision", "knobs", "total", "first", "equal"),
    [  # bytes per weight: of the checkpoint, and of a rank; measured with megatron-core 0.16.1
        ("bf16", {"use_distributed_optimizer": True}, 14.0, 2.0 + 12.0 / 2, 14.0 / 2),
        ("bf16", {"use_distributed_optimizer": False}, 14.0, 14.0, 14.0 / 2),
        ("fp32", {"use_distributed_optimizer": True}, 16.0, 4.0 + 12.0 / 2, 16.0 / 2),
        ("fp32", {"use_distributed_optimizer": False}, 12.0, 12.0, 12.0 / 2),
        ("fp32", {"tensor_model_parallel_size": 2}, 12.0, 12.0 / 2, 12.0 / 2),
    ],
)
def test_bytes_of_a_checkpoint(precision: str, knobs: dict[str, Any], total: float, first: float, equal: float) -> None:
    small = {**MODEL, "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8}
    data = spec(
        {},
        model={**small, "num_query_groups": 4, "vocab_size": 4096, "kv_channels": 64},
        cluster={"chip": "H100-SXM", "devices_per_node": 2},
        train={**spec()["train"], "precision": precision},
        auto_tuner={"space": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **knobs}},
    )
    ways = goodput(data, 1)[0][0]["ways"]
    assert ways["sync"]["total_bytes"] == pytest.approx(total * 10_095_104, rel=0.001)
    assert ways["sync"]["rank_bytes"] == pytest.approx(first * 10_095_104, rel=0.005)
    assert ways["parallel"]["rank_bytes"] == pytest.approx(equal * 10_095_104, rel=0.005)
    assert ways["async"]["pinned_bytes"] == 2 * ways["async"]["rank_bytes"]


def first(job: Mapping[str, Any] | None = KNOWN, **changes: Any) -> dict[str, Any]:
    return goodput(spec(job, **changes), 1)[0][0]


def test_the_winner_changes_when_failures_do() -> None:
    slow = {"restart_time": "60s", "storage_bytes_per_second": 1e11, "rank_bytes_per_second": 5e7, "saves": ["sync"]}
    rare, frequent = (first({**slow, "device_mtbf": f"{hours:.0f}h"}) for hours in (1e7, 1e3))
    assert rare["number"] == 1 < frequent["number"]
    assert frequent["ways"]["sync"]["rank_bytes"] < rare["ways"]["sync"]["rank_bytes"]
    held = goodput(spec({**slow, "device_mtbf": "1000h"}), 100)[0]
    assert [each["ways"]["sync"]["tokens_per_day"] for each in held] == sorted(
        (each["ways"]["sync"]["tokens_per_day"] for each in held), reverse=True
    )


def test_figures_of_the_ways_to_save() -> None:
    job = {**KNOWN, "tokens": 1e12, "process_failures": 0.5, "repair_time": "2d", "spare_nodes": 1}
    ways = first(job)["ways"]
    assert {*ways} == {"sync", "parallel", "async", "memory"}
    assert ways["sync"]["total_bytes"] == pytest.approx(14.0 * WEIGHTS, rel=0.001)
    assert ways["parallel"]["write_s"] == pytest.approx(14.0 * WEIGHTS / 20e9, rel=0.001)
    assert ways["sync"]["write_s"] > ways["sync"]["rank_bytes"] / 1e9
    assert ways["async"]["hold_s"] < 1.0 < ways["parallel"]["hold_s"] < ways["sync"]["hold_s"]
    assert ways["memory"]["goodput"] > ways["async"]["goodput"] > ways["parallel"]["goodput"] > ways["sync"]["goodput"]
    for each in ways.values():
        assert each["interval_s"] >= each["write_s"] * bool(each["pinned_bytes"])
        assert each["days"] == pytest.approx(1e12 / each["tokens_per_day"])
    waiting = waiting_share(1, 64 / (PUBLISHED["rsc-1"]["hours"] * HOUR), 2 * DAY)
    always = first({key: job[key] for key in job if key != "repair_time"})["ways"]["async"]["goodput"]
    assert ways["async"]["goodput"] == pytest.approx(always * (1.0 - waiting))
    given = first({**KNOWN, "days": 2, "save_interval": 50, "saves": ["parallel"]})["ways"]["parallel"]
    assert (given["steps"], given["tokens"]) == (50, pytest.approx(2 * given["tokens_per_day"]))
    assert "--save-interval 50" in given["settings"]
    often = {"device_mtbf": "50000s", "restart_time": "10s", "saves": ["async"]}
    for rate in (16e9, 18e9, 20e9, 22e9):
        way = first({**often, "storage_bytes_per_second": rate})["ways"]["async"]
        assert way["interval_s"] >= way["write_s"]


def test_several_node_groups_are_refused_with_a_fix() -> None:
    groups = [{"chip": chip, "nodes": 4, "devices_per_node": 8} for chip in ("H100-SXM", "H200")]
    with pytest.raises(UsageError, match="several node groups are not known; give one kind of chip"):
        goodput(spec(cluster={"groups": groups}, auto_tuner={}), 1)


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("device_mtbf", "if a node fails more than once in"),
        ("storage_bytes_per_second", "if the storage writes less than"),
        ("restart_time", "each minute of job.restart_time takes"),
        ("rank_bytes_per_second", "if a rank writes less than"),
        ("repair_time", "spare nodes keep waits below"),
    ],
)
def test_unknown_inputs_give_a_break_even(without: str, words: str) -> None:
    job = {**KNOWN, "device_mtbf": "400h", "storage_bytes_per_second": 1e9, "spare_nodes": 1, "repair_time": "1h"}
    records, notes, _knobs = goodput(spec({key: job[key] for key in job if key != without}), 1)
    assert [note for note in notes if words in note]
    if without == "storage_bytes_per_second":
        assert "--save-interval N" in records[0]["ways"]["parallel"]["settings"]
    assert records[0]["ways"]["parallel"]["goodput"] is None or without not in (
        "device_mtbf",
        "storage_bytes_per_second",
    )
    assert not [note for note in goodput(spec(job), 1)[1] if words in note]


def test_a_job_that_fails_before_each_step_makes_no_progress() -> None:
    with pytest.raises(NothingFits, match="no progress"):
        goodput(spec({**KNOWN, "device_mtbf": "1s"}))


def test_an_estimate_has_the_days_of_the_tokens_and_goodput_no_less() -> None:
    tokens = {**KNOWN, "tokens": 1e12}
    plan, best = api.estimate(spec(tokens)), goodput(spec(tokens))[0][0]
    assert plan.expected_s
    rate = 256 * 4096 / plan.expected_s[0]
    assert f"~{1e12 / rate / DAY:.3g} days" in plan.expected
    assert best["ways"][best["way"]]["days"] * plan.expected_s[0] > 1e12 / rate / DAY * best["step_time_s"]


def test_crossing_is_the_largest_change_of_sign() -> None:
    assert crossing(lambda value: 5.0 - value, 1.0, 1e6) == pytest.approx(5.0)
    assert crossing(lambda value: (value - 2.0) * (value - 50.0), 1.0, 1e6) == pytest.approx(50.0)
    assert crossing(lambda value: -1.0, 1.0, 1e9) is None


def test_the_command_prints_tables_and_records(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec()))
    table = CliRunner().invoke(goodput_command, [str(file), "--top", "2", "--set", "job.saves=[async]"])
    assert table.exit_code == 0
    assert "--async-save --ckpt-assume-constant-structure" in table.stdout
    records = json.loads(CliRunner().invoke(goodput_command, [str(file), "--json"]).stdout)
    assert len(records) == 5
    assert records[0]["way"] == "async"


def test_a_model_needs_no_spec(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.yaml"
    words = ["--model", "Qwen/Qwen3-8B", "--chip", "H100-SXM", "--nodes", "16", "--set", "job.device_mtbf=rsc-1"]
    ran = CliRunner().invoke(goodput_command, [*words, "--top", "1", "--json", "-o", str(chosen)])
    assert ran.exit_code == 0, ran.output
    (record,) = json.loads(ran.stdout)
    assert f"add {record['ways'][record['way']]['settings']} to the program" in ran.stderr
    found = read_spec(chosen)
    assert found.cluster.nodes == 16
    assert found.space["pipeline_model_parallel_size"] == (record["candidate"]["pipeline_model_parallel_size"],)
    assert "--chip" in str(CliRunner().invoke(goodput_command, ["--model", "Qwen/Qwen3-8B"]).exception)
    for wrong in ([], [str(chosen), "--model", "Qwen/Qwen3-8B"], [str(chosen), "--engine", "deepspeed"]):
        assert CliRunner().invoke(goodput_command, wrong).exit_code == 2


def test_the_chosen_spec_saves_in_the_best_way(tmp_path: Path) -> None:
    file, chosen = tmp_path / "spec.json", tmp_path / "chosen.yaml"
    command = ["torchrun", "--nproc-per-node=8", "pretrain_gpt.py", "--save-interval", "500"]
    file.write_text(json.dumps(spec(train={**spec()["train"], "command": command})))
    ran = CliRunner().invoke(goodput_command, [str(file), "--json", "-o", str(chosen)])
    best = json.loads(ran.stdout)[0]
    exported = api.export(chosen, "megatron", output=tmp_path / "files").files
    script = next(each for each in exported if each.suffix == ".sh").read_text()
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    assert words[words.index("--tensor-model-parallel-size") + 1] == str(
        best["candidate"]["tensor_model_parallel_size"]
    )
    assert "--async-save" in words
    last = len(words) - words[::-1].index("--save-interval")
    assert words[last] == str(int(best["ways"]["async"]["steps"]))


def test_jobs_whose_checkpoints_are_not_known_are_refused() -> None:
    groups = [{"chip": "H100-SXM", "devices_per_node": 1}, {"chip": "A100-SXM4-80GB", "devices_per_node": 1}]
    with pytest.raises(UsageError, match="checkpoints"):
        goodput(spec(model={**MODEL, "num_layers": 4}, cluster={"groups": groups}, auto_tuner={"space": {}}))
