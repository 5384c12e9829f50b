"""Laws of predicted steps, and the rules of the space. Commands of the frameworks become specs, and trials change only
what differs."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_importers.command import read_command
from flagcore_rl.commands import on_all_nodes
from flagcore_rl.engine import NEMO_RL
from flagcore_rl.job import Lengths, quantiles
from flagcore_rl.predict import batches

from flagcore import api
from flagcore.api.inputs import open_spec, read_spec
from flagcore.domain.space import Candidate
from flagcore.errors import FlagError, LaunchError, SpecError
from flagcore.plugins import find_engine
from flagcore.report.explanation import memory_parts
from tests.checks import refuses
from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install
from tests.tasks import planned

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "vocab_size": 32000}
LENGTHS = {"mean": 300.0, "longest": 1024}


def record(candidate: Mapping[str, Any] = {}, devices: int = 8, **rl: Any) -> dict[str, Any]:
    """A job record on some devices, with changes."""
    job = {
        "engine": "nemo-rl",
        "trainer": {"engine": "megatron"},
        "rollout": {"engine": "vllm"},
        "prompts": 16,
        "samples": 8,
        "prompt_len": {"mean": 64.0, "longest": 128},
        "answer_len": LENGTHS,
        **rl,
    }
    cluster = {"chip": "H100-SXM", "devices": devices, "devices_per_node": 8}
    return {"id": "a", "kind": "rl", "model": MODEL, "cluster": cluster, "rl": job, "candidate": dict(candidate)}


def spec(**rl: Any) -> dict[str, Any]:
    """A spec on 8 devices, with changes of its job."""
    return {"model": MODEL, "cluster": {"chip": "H100-SXM", "devices_per_node": 8}, "rl": record(**rl)["rl"]}


def predicted(*records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The predictions of job records."""
    answers = list(api.estimate_jobs({**each, "id": str(number)} for number, each in enumerate(records)))
    assert [each["status"] for each in answers] == ["ok"] * len(answers), answers
    return answers


PLUGIN = """
    from flagcore.hooks import hookimpl
    from flagcore.physics.roofline import PlainMemory

    @hookimpl
    def flagcore_memory_model(group, engine):
        return PlainMemory(capacity=80e9, context_bytes=30e9) if engine == "megatron" else None
"""


def test_roles_ask_the_plugins_of_the_command(install: Install) -> None:
    (before,) = api.estimate_jobs([record()])
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    (asked,), (without,) = (api.estimate_jobs([record()], without=names) for names in ((), ("acme",)))
    assert without == before
    assert asked["memory"]["device_used_gib"] > before["memory"]["device_used_gib"] + 20


def seconds(answer: Mapping[str, Any]) -> float:
    return float(answer["step_time_s"]["value"])


@pytest.mark.parametrize("apart", [{}, {"rollout_devices": 4}, {"rollout_devices": 4, "staleness": 1}])
def test_a_longer_tail_never_makes_a_step_shorter(apart: Mapping[str, Any]) -> None:
    tails = [
        {**LENGTHS, "longest": longest, "spread": spread} for longest in (512, 1024, 4096) for spread in (0.4, 0.9)
    ]
    candidate = {**apart, "micro_batch_tokens": 8192}
    tails.sort(key=lambda each: (each["spread"], each["longest"]))
    times = [seconds(each) for each in predicted(*(record(candidate, staleness=1, answer_len=tail) for tail in tails))]
    assert times[:3] == sorted(times[:3])
    assert times[3:] == sorted(times[3:])


def test_more_rollout_devices_never_make_generation_longer() -> None:
    answers = predicted(*(record({"rollout_devices": number}, 16) for number in (8, 12, 14, 15)))
    times = [each["time"]["generation_s"] for each in answers]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("share", ["0.05", "0.1", "0.2", "0.8"])
def test_no_part_of_the_memory_is_negative(share: str) -> None:
    platform = planned({**spec(), "model": "Qwen/Qwen3-8B"})
    columns = NEMO_RL.columns(platform.task, {"rollout_memory_share": share, "activation_checkpointing": "full"})
    found = NEMO_RL.predict(platform.task, columns, platform.costs).row(0)
    parts = memory_parts(found)
    assert min(parts.values()) >= 0.0
    assert sum(parts.values()) == pytest.approx(found.device_used_bytes, rel=1e-3)
    assert any("share" in name for name in parts) is (share < "0.8")


def test_colocated_memory_is_the_sum_unless_one_role_makes_room() -> None:
    kept: dict[str, Any] = {
        "trainer": {"engine": "megatron", "offload": "none"},
        "rollout": {"engine": "vllm", "sleeps": False},
    }
    apart, together, asleep = predicted(record({"rollout_devices": 4}), record(**kept), record())
    used = [each["memory"]["device_used_gib"] for each in (apart, asleep, together)]
    assert used == sorted(used)
    assert used[1] < used[2]
    contexts = [each["memory"]["device_used_gib"] - each["memory"]["reserved_gib"] for each in (apart, together)]
    assert 0.0 < contexts[0] < contexts[1] < 2 * contexts[0]  # one for each; what the driver keeps counts once
    shares = predicted(*(record({"rollout_memory_share": share}, **kept) for share in ("0.3", "0.5")))
    less, more = (each["memory"]["device_used_gib"] for each in shares)
    assert more - less == pytest.approx(0.2 * shares[0]["memory"]["capacity_gib"])


def test_samples_of_several_steps_are_generated_at_once() -> None:
    """The tail of a step's answers runs beside the answers of the next ones."""
    tail = {**LENGTHS, "longest": 4096, "spread": 0.9}
    jobs = [record({"rollout_devices": 4, "staleness": n}, staleness=n, answer_len=tail) for n in (1, 2, 4, 9)]
    generated = [each["generation_s"] for each in predicted(*jobs)]
    assert generated[0] > generated[1] > generated[2] == generated[3]


def test_parts_add_up_and_staleness_hides_generation() -> None:
    on_policy, stale = predicted(
        record({"rollout_devices": 4}), record({"rollout_devices": 4, "staleness": 1}, staleness=1)
    )
    for each in (on_policy, stale):
        assert sum(each["time"].values()) == pytest.approx(seconds(each))
    assert seconds(stale) < seconds(on_policy)
    assert stale["time"]["generation_s"] < on_policy["time"]["generation_s"]
    assert on_policy["trainer_waits_s"] == on_policy["generation_s"]
    assert stale["rollout_waits_s"] < on_policy["rollout_waits_s"]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ({"staleness": 1}, "staleness needs rollout_devices"),
        ({"rollout_devices": 8}, "leave devices for the trainer"),
        ({"tensor_model_parallel_size": 3}, "must divide the devices of the trainer"),
        ({"rollout_devices": 4, "rollout_tensor_parallel_size": 8}, "must divide those of the rollout"),
        ({"pipeline_model_parallel_size": 8}, "PP must divide the layers"),
    ],
)
def test_illegal_candidates_say_why(candidate: Mapping[str, Any], reason: str) -> None:
    (answer,) = api.estimate_jobs([record(candidate)])
    assert answer["status"] == "invalid"
    assert reason in answer["reason"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mini_batch": 100}, "rl.mini_batch"),
        ({"prompts": 1_000_000}, "rl.prompts"),
        ({"answer_len": {"mean": 5000.0, "longest": 1024}}, "rl.answer_len.mean"),
        ({"answer_len": {"mean": 300.0}}, "rl.answer_len.longest"),
        ({"answer_len": {"longest": 1024}}, "rl.answer_len"),
        ({"answer_len": {**LENGTHS, "histogram": {"300": 1.0}}}, "rl.answer_len"),
        ({"prompt_len": {"file": "missing.txt"}}, "rl.prompt_len.file"),
        ({"reward": {"model": "no/such-model"}}, "rl.reward.model"),
        ({"trainer": {"engine": "deepspeed"}}, "rl.trainer.engine"),
    ],
)
def test_bad_input_is_one_message(change: Mapping[str, Any], key: str) -> None:
    with refuses(key):
        open_spec(spec(**change))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rl": spec(rollout={"engine": "megatron"})["rl"]}, "rl.rollout.engine"),
        ({"rl": spec(rollout={"engine": "llamacpp"})["rl"]}, "rl.rollout.engine"),
        *(
            ({"rl": spec(**{role: {"engine": engine, section: {name: 4}}})["rl"]}, f"rl.{role}.{section}.{name}")
            for role, engine, section, name in (
                ("rollout", "vllm", "engine_args", "tensor_parallel_size"),
                ("rollout", "vllm", "engine_args", "max-num-seq"),
                ("trainer", "megatron", "settings", "recompute_granularity"),
                ("trainer", "fsdp2", "settings", "micro_batch_size"),
            )
        ),
        (
            {"cluster": {"groups": [{"chip": chip, "devices_per_node": 8} for chip in ("H100-SXM", "H20")]}},
            "cluster.groups",
        ),
    ],
)
def test_what_is_not_predicted_is_refused(change: Mapping[str, Any], key: str) -> None:
    with refuses(key):
        open_spec({**spec(), **change}, plan=True)


def test_the_context_of_a_rollout_holds_the_longest_possible_sample() -> None:
    lengths = {"prompt_len": {"mean": 100.0, "longest": 128}, "answer_len": {"mean": 500.0, "longest": 4096}}
    rollout = {"engine": "vllm", "engine_args": {"max_model_len": 4223}}
    with pytest.raises(SpecError, match="max_model_len must be at least 4224"):
        api.estimate(spec(rollout=rollout, **lengths))


def test_settings_of_roles_that_are_not_predicted_are_named() -> None:
    trainer = {"engine": "megatron", "settings": {"overlap_grad_reduce": True, "foo": 1}}
    rollout = {"engine": "vllm", "engine_args": {"bar": 1, "max_model_len": 2048}}
    names = {each.name for each in planned(spec(trainer=trainer, rollout=rollout)).unmodelled}
    assert {"rl.trainer.settings.foo", "rl.rollout.engine_args.bar"} == names


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"engine_version": "99"}, "rl.engine_version = 99 is not a release of nemo-rl"),
        ({"rollout": {"engine": "vllm", "engine_version": "99"}}, "rl.rollout.engine_version = 99 is not a release"),
        ({"staleness": 900}, "rl.staleness = 900 is predicted as 4"),
        ({"answer_len": {"mean": 900.0, "longest": 41000}}, "41128 tokens, more than the model's context of 40960"),
        ({"packing": False, "answer_len": {"mean": 300.0, "longest": 4096}}, "the longest has 4,224 tokens a sample"),
        ({"engine_version": "0.6.0", "staleness": 1}, ""),
    ],
)
def test_odd_values_are_named(changes: Mapping[str, Any], warning: str) -> None:
    data = {**spec(**changes), "model": "Qwen/Qwen3-8B"}
    found = NEMO_RL.warnings(planned(data).task)
    others = [each for each in found if "rl.command is missing" not in each]
    assert ([warning in each for each in others], len(found) - len(others)) == ([True] * bool(warning), 1)


@pytest.mark.costly
def test_a_new_spec_is_complete() -> None:
    new = api.new_spec("verl", "Qwen/Qwen3-8B", {"chip": "H100-SXM"}, api.defaults_of("verl"))
    work: Any = open_spec(new.data).spec.work
    assert work.answer_len.longest == 4096


def test_lengths_keep_their_mean_and_reach_the_longest() -> None:
    found = quantiles(Lengths(mean=800.0, longest=1024), 500)
    assert sum(found) / 500 == pytest.approx(800.0, rel=0.01)
    assert found[0] == 1024


def test_lengths_of_a_log_replace_log_normal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("100\n" * 9990 + "1000\n" * 9 + "4000\n")
    data = spec(answer_len={"file": "lengths.txt", "longest": 2000}, prompt_len={"histogram": {"10": 3.0, "90": 1.0}})
    work: Any = planned(data).task.spec.work
    assert (work.prompt_len.mean, work.prompt_len.longest, work.answer_len.longest) == (30.0, 90, 2000)
    found = quantiles(work.answer_len, 4096)
    assert (found[0], found[3], found[4], found[-1]) == (1000, 1000, 100, 100)
    answers = {"histogram": {"100": 999.0, "1000": 1.0}, "longest": 2000}
    known, again = predicted(record(**{**data["rl"], "answer_len": answers}), record(**work.record({})))
    assert seconds(again) == pytest.approx(seconds(known), rel=0.01)


def test_experts_are_grouped_unless_the_trainer_says_otherwise() -> None:
    experts = {**MODEL, "num_moe_experts": 64, "moe_router_topk": 4, "moe_ffn_hidden_size": 512}
    alone = {"engine": "megatron", "settings": {"moe_grouped_gemm": False}}
    jobs = (record(), record(trainer=alone))
    usual, slow = predicted(*({**job, "model": experts} for job in jobs))
    assert usual["time"]["training_s"] < 0.8 * slow["time"]["training_s"]


def test_a_plugin_gives_slower_hosts() -> None:
    data = {**spec(), "cluster": {"chip": "GB200", "nodes": 2, "devices_per_node": 4}}
    platform = planned(data)
    columns = NEMO_RL.columns(platform.task, {})
    costs = (platform.costs, replace(platform.costs, overheads={}))
    slow, fast = (NEMO_RL.predict(platform.task, columns, each).time_s["generation_s"][0] for each in costs)
    assert fast < 0.7 * slow


@pytest.mark.parametrize(("stages", "pads", "tokens"), [(1, True, 864), (2, False, 864), (2, True, 1137)])
def test_stages_pad_packed_micro_batches_to_the_longest(stages: int, pads: bool, tokens: int) -> None:
    answers = {"mean": 800.0, "longest": 1024, "spread": 0.1}
    work: Any = read_spec(spec(answer_len=answers)).work
    values = {"pipeline_model_parallel_size": stages}
    assert batches(work, values, 128, 1, forward=False, pads_stages=pads) == (tokens, 1, 128)


def test_more_recompute_takes_as_long_and_larger_micro_batches_need_as_much_memory() -> None:
    found = {"micro_batch_size": 4, "activation_checkpointing": "selective"}
    others = [{**found, "micro_batch_size": 8}, {**found, "activation_checkpointing": "none"}]
    others += [{**found, "activation_checkpointing": "full"}, {**found, "rollout_devices": 4}]
    task = planned(spec()).task
    neutral = {knob.name: knob.neutral for knob in NEMO_RL.knobs if knob.searchable}
    rows = [NEMO_RL.columns(task, {**neutral, **each}) for each in others]
    columns = {name: np.concatenate([row[name] for row in rows]) for name in neutral}
    candidate = Candidate.of({**neutral, **found})
    assert NEMO_RL.needs_at_least(columns, candidate).tolist() == [True, True, False, False]
    assert NEMO_RL.takes_at_least(columns, candidate).tolist() == [False, False, True, False]


def test_log_probabilities_of_all_samples_take_as_long_for_any_mini_batch() -> None:
    answers = predicted(*(record(packing=False, mini_batch=size) for size in (32, 64, 128)))
    assert len({each["time"]["logprobs_s"] for each in answers}) == 1
    training = [each["time"]["training_s"] for each in answers]
    assert training == sorted(training, reverse=True)
    assert training[0] > training[-1]


def test_a_reward_model_takes_a_forward_pass_and_memory() -> None:
    without, same = predicted(record(), record(reward={"model": MODEL}))
    assert same["time"]["rewards_s"] - without["time"]["rewards_s"] == pytest.approx(same["time"]["logprobs_s"])
    weights = 2.0 * 131_072_000 / 2**30
    assert same["memory"]["device_used_gib"] - without["memory"]["device_used_gib"] == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize(
    ("apart", "offload", "share"), [({}, "none", 1.0), ({}, "all", 0.0), ({"rollout_devices": 4}, "all", 1.0)]
)
def test_a_critic_needs_the_memory_of_the_policy(apart: Mapping[str, Any], offload: str, share: float) -> None:
    job = {"candidate": apart, "trainer": {"engine": "megatron", "offload": offload}}
    without, same = (each["memory"]["static_gib"] for each in predicted(record(**job), record(**job, critic=True)))
    assert same == pytest.approx((1.0 + share) * without)


@pytest.mark.costly
def test_the_usual_baseline_is_colocated_with_the_smallest_layout() -> None:
    baseline = open_spec(spec(staleness=1), plan=True).problem.baseline.as_dict()
    sizes = [baseline[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "rollout_tensor")]
    assert (baseline["rollout_devices"], baseline["staleness"], sizes) == (None, 0, [1, 1, 1])
    assert (baseline["activation_checkpointing"], baseline["micro_batch_tokens"]) == ("full", 1152)


def test_a_space_places_both_roles() -> None:
    data = spec(staleness=1)
    data["auto_tuner"] = {"space": {"context_parallel_size": 1, "micro_batch_tokens": 1152}}
    space = open_spec(data, plan=True).problem.space
    values = space.choices
    assert values["rollout_devices"][0] is None
    assert set(values["staleness"]) == {0, 1}


def test_a_space_of_more_candidates_than_are_predicted_in_time_is_refused() -> None:
    data = spec(staleness=1)
    data["auto_tuner"] = {"space": {"micro_batch_tokens": list(range(1152, 1152 + 4000))}}
    with pytest.raises(SpecError, match=r"more than 131,072 candidates; .*micro_batch_tokens \(4000 values\)"):
        open_spec(data, plan=True)


CASES: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "commands.yaml").read_text())
LOGS = {
    "verl": "(TaskRunner pid=1) step:{n} - actor/loss:0.1 - timing_s/gen:6.5 - timing_s/old_log_prob:1.0 "
    "- timing_s/ref:0.5 - timing_s/update_actor:2.0 - timing_s/step:{s} - perf/throughput:9",
    "nemo-rl": "Timing:\n  • Total step time: {s}s\n  • generation: 6.50s (65.0%)\n  • policy_training: 2.00s (20.0%)\n"
    "  • policy_and_reference_logprobs: 1.50s (15.0%)",
    "slime": "perf {n}: {{'perf/train_wait_time': 6.5, 'perf/log_probs_time': 1.0, 'perf/ref_log_probs_time': 0.5, "
    "'perf/actor_train_time': 2.0, 'perf/step_time': {s}}}",
    "openrlhf": "Global step {n}: {{'timing/make_experience': 1.5, 'timing/ppo_train': 2.0, 'timing/generation': 6.5, "
    "'timing/step_total': {s}}}",
    "trl": "{{'loss': '0.1', 'step_time': '{s}', 'epoch': '0.1'}}",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(case: Mapping[str, Any], folder: Path) -> Any:
    """The imported spec of a case, whose files are written."""
    for name, text in {**case.get("files", {}), "run.sh": case["text"]}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_command(None, ["run.sh"], chip="H100-SXM")


@pytest.mark.parametrize("name", CASES)
def test_a_command_is_its_own_baseline_and_trials_change_it(name: str, folder: Path) -> None:
    case = CASES[name]
    imported = spec_of(case, folder)
    data = imported.data
    assert [data["cluster"]["nodes"], data["cluster"]["devices_per_node"]] == case["cluster"]
    assert {key: data["rl"][key] for key in case["rl"]} == case["rl"]
    assert data["auto_tuner"]["baseline"] | case["baseline"] == data["auto_tuner"]["baseline"]
    assert {note.key for note in imported.notes} >= {*case["notes"]}

    data["auto_tuner"]["space"] = dict(data["auto_tuner"]["baseline"])
    platform = open_spec(data, None, (), plan=True).problem.platform
    assert ("rl.rollout by transformers" in {each.name for each in platform.unmodelled}) is name.startswith("trl")
    engine = find_engine(data["rl"]["engine"], "rl.engine")
    own = {knob.name: data["auto_tuner"]["baseline"].get(knob.name, knob.neutral) for knob in engine.knobs}
    unchanged = engine.launch(platform, Candidate.of(own), "out", for_real=True)
    words, several = data["rl"]["command"], case["cluster"][0] > 1 and not name.startswith("trl")
    start, nodes = unchanged.argv[: -len(words)], str(case["cluster"][0])
    assert [*unchanged.argv[len(start) :]] == words
    assert start[3:] == (("ray", nodes) if several else ())  # one program, and a process of Ray on each node
    argv = engine.launch(platform, Candidate.of({**own, **case["changed"]}), "FOLDER").argv[len(start) :]
    assert {*case["words"]} <= {*argv}
    assert not {"--save", "--recompute-granularity", "--actor.gradient_checkpointing_enable"} & {*argv}
    again = engine.reading(platform.task.spec.work).__class__(engine.name, argv, folder).baseline(engine.knobs)
    changed = {knob: value for knob, value in case["changed"].items() if value != "none"}
    assert again | changed == again


def test_a_setting_of_a_command_stays_unless_the_space_says_otherwise(folder: Path) -> None:
    data = spec_of(CASES["verl"], folder).data
    data["auto_tuner"] = {}
    task, engine = planned(data).task, find_engine("verl", "rl.engine")
    axes = {axis.knob: axis.values for axis in engine.axes(task)}
    assert axes["rollout_memory_share"] == ("0.5", "0.7", "0.85")
    assert axes["rollout_devices"] == (None,)
    with refuses("auto_tuner.space.rollout_devices"):
        engine.axes(replace(task, spec=replace(task.spec, space={"rollout_devices": (8,)})))


@pytest.mark.parametrize("name", LOGS)
def test_times_of_steps_and_of_their_parts_are_read(name: str, folder: Path) -> None:
    case = CASES[name]
    data = spec_of(case, folder).data
    data["auto_tuner"] = {"control": {"train_iters": 3}}
    task = planned(data).task
    engine = find_engine(name, "rl.engine")
    lines = [LOGS[name].format(n=n, s=seconds) for n, seconds in enumerate((30.0, 10.0, 11.0))]
    (folder / "stdout.log").write_text("\n".join(("INFO start", *lines, "")))
    found = engine.read(task, Candidate.of({}), str(folder))
    assert (found.step_times_s, found.step_time_s) == ((10.0, 11.0), 10.5)
    parts = {"generation_s": 6.5, "logprobs_s": 1.5, "training_s": 2.0} if name != "trl" else {}
    assert found.figures == parts


MISMATCHES = {
    "verl": "step:1 - training/rollout_probs_diff_max:0.9 - training/rollout_probs_diff_mean:{} - actor/loss:0.1",
    "nemo-rl": "  • Loss: 0.1\n  • Generation KL Error: {}\n  • Avg Reward: 0.2",
    "slime": "step 1: {{'train/loss': 0.1, 'train/train_rollout_logprob_abs_diff': {}, 'train/grad_norm': 2.0}}",
    "openrlhf": "Global step 1: {{'vllm_kl': -{}, 'timing/step_total': 3.0}}",
    "trl": "{{'loss': '0.1', 'sampling/sampling_logp_difference/mean': '{}', 'step_time': '3.0'}}",
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_rollout_that_differs_more_from_the_trainer_than_the_baselines_has_other_answers(
    name: str, folder: Path
) -> None:
    engine = find_engine(name, "rl.engine")
    for trial, value in {"base": "0.0100", "same": "1.2e-02", "wrong": "0.8", "silent": None}.items():
        (folder / trial).mkdir()
        line = "" if value is None else MISMATCHES[name].format(value)
        (folder / trial / "stdout.log").write_text(f"start\n{line}\n")
    base, same, wrong, silent = (str(folder / each) for each in ("base", "same", "wrong", "silent"))
    found = engine.answers(None, "rounding", same, base)
    assert found.difference == pytest.approx(0.2)
    assert found.difference < found.limit
    found = engine.answers(None, "rounding", wrong, base)
    assert found.difference == pytest.approx(79)
    assert found.difference > found.limit
    assert engine.answers(None, "rounding", silent, base) is None
    with pytest.raises(FlagError):
        engine.answers(None, "changes", silent, base)


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B "


@pytest.mark.parametrize("one_step_off", [False, True])
def test_a_command_gets_the_devices_of_the_plan(folder: Path, one_step_off: bool) -> None:
    words = VERL + "trainer.nnodes=1 trainer.n_gpus_per_node=4"
    if one_step_off:
        words = words.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
        words += " rollout.nnodes=1 rollout.n_gpus_per_node=4"
    data = spec_of({"text": words}, folder).data
    platform = planned({**data, "cluster": {"chip": "H100-SXM", "nodes": 4, "devices_per_node": 8}})
    candidate = Candidate.of(data["auto_tuner"]["baseline"])
    if one_step_off:  # the nodes of each role would have to be chosen
        with pytest.raises(LaunchError, match="4 x 8"):
            find_engine("verl", "rl.engine").launch(platform, candidate, "out")
        return
    argv = find_engine("verl", "rl.engine").launch(platform, candidate, "out").argv
    assert {"trainer.nnodes=4", "trainer.n_gpus_per_node=8"} < {*argv}


def test_processes_need_a_launcher(folder: Path) -> None:
    words = "python train.py --num_generations 4 --per_device_train_batch_size 4 --model_name_or_path Qwen/Qwen3-0.6B"
    data = spec_of({"text": words}, folder).data
    data |= {"cluster": {"chip": "H100-SXM", "devices_per_node": 4}, "auto_tuner": {}}
    platform = planned(data)
    with pytest.raises(LaunchError, match="accelerate launch"):
        find_engine("trl", "rl.engine").launch(platform, Candidate.of({"micro_batch_size": 1}), "out")


def test_passes_of_log_probabilities_hold_the_logits_of_their_batch() -> None:
    """OpenRLHF issue 1066: micro_rollout_batch_size 32 with long samples is out of memory."""
    rollout = {"engine": "vllm", "sleeps": False}
    sizes = [{"micro_batch_size": 1, "logprob_batch_size": size} for size in (8, 16)]
    small, large = predicted(*(record(packing=False, rollout=rollout, candidate=each) for each in sizes))
    more = large["memory"]["device_used_gib"] - small["memory"]["device_used_gib"]
    assert more == pytest.approx(0.1735, abs=1e-3)  # 8 samples of 364 tokens with 32,000 logits of 2 bytes


def test_trls_updates_have_no_whole_logits() -> None:
    """trl 1.16: tiles of at most 4096 x 32768 logits, which the vocabulary of this model does not exceed."""
    tiled, whole = predicted(*(record(engine=name, trainer={"engine": "fsdp2"}) for name in ("trl", "verl")))
    saved = whole["memory"]["device_used_gib"] - tiled["memory"]["device_used_gib"]
    assert saved > 10 * 1152 * MODEL["vocab_size"] / 2**30


def test_ray_starts_with_the_devices_that_slurm_assigns(tmp_path: Path) -> None:
    """Ray 2.45 raises an error if ROCR_VISIBLE_DEVICES is set."""
    ray, found = tmp_path / "ray", tmp_path / "ray.log"
    ray.write_text('#!/bin/sh\n[ "$1" != status ] || exec echo " 1 node_"\n(set | grep VISIBLE) > "$0.log"\n')
    ray.chmod(0o755)
    places = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ROCR_VISIBLE_DEVICES": "2,3"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(on_all_nodes(("sleep", "0.3"), 1), env={**places, **path}, check=True)
    assert found.read_text().replace("'", "") == "HIP_VISIBLE_DEVICES=2,3\n"
