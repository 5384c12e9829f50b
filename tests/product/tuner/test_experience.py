"""What trials were measured at, as files.

The default baseline, what plugins advise for a serving job, and limits that no candidate is predicted to keep.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_serving.job import Load, ServeSpec

from engines.models.tests.examples import mixed
from flagcore import api
from flagcore.api.jobs import past
from flagcore.contracts import Problem
from flagcore.domain.engine import PreferredSetting, TaskAdvice
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import Trial, TrialState
from flagcore.errors import NothingFits
from flagcore.plugins import LoadedPlugins
from flagcore.spec.jobs import read_job
from flagcore.tuner.experience import Experience
from flagcore.tuner.feasibility import crowded_baseline_text
from flagcore.tuner.problem import UNUSUAL_SHARE, build_problem, candidate_columns, recommended_row, rows_by_time
from flagcore.tuner.stages.build import PLANNED_SHARE, canonical
from flagcore.tuner.stages.predict import predict_columns
from tests.product import tasks
from tests.product.tasks import ENGINES, LLAMA_8B
from tests.tuner.stages.test_discover import advising, completed, loaded, plugin, spec


@pytest.fixture
def experience(tmp_path: Path) -> Experience:
    return Experience(tmp_path / "data" / "experience")


def trial(number: int, state: TrialState = TrialState.MEASURED) -> Trial:
    step = 2.0 if state is TrialState.MEASURED else None
    return tasks.trial(number, tasks.candidate(micro_batch_size=number + 1), step, spread_s=0.1, state=state)


def test_measured_trials_are_found_again_by_chip_and_engine(experience: Experience) -> None:
    task = tasks.task(tasks.DENSE)
    chip, engine = task.cluster.groups[0].chip, task.spec.train.engine
    experience.save("one", tasks.platform(task), [trial(0), trial(1, TrialState.FAILED)])
    (record,) = experience.records(chip, engine)
    assert (record["id"], record["measured"]["step_time_s"]) == ("one/0", 2.0)
    assert list(experience.records(chip, "another")) == []
    assert list(experience.records(replace(chip, name="another", aliases=("another",)), engine)) == []
    assert list(experience.records(chip, engine, exclude_run="one")) == []


def serving(*loads: Load) -> Task:
    task = tasks.task(tasks.DENSE)
    work = ServeSpec(engine="vllm", loads=loads, engine_args={"max_model_len": 2048})
    return replace(task, spec=replace(task.spec, work=work, objective="output_tokens_per_s"))


def test_a_trial_of_a_server_is_kept_as_a_job_record_with_its_load_and_version(experience: Experience) -> None:
    task = serving(Load(request_rate=math.inf, num_prompts=64))
    trial_ = trial(0)
    assert trial_.measurement is not None
    measured = replace(trial_.measurement, versions={"vllm": "0.32.0"})
    experience.save(
        "one",
        tasks.platform(task),
        [replace(trial_, measurement=measured, candidate=Candidate.of({"max_num_seqs": 8}))],
    )
    (record,) = experience.records(task.cluster.groups[0].chip, "vllm")
    assert record["measured"]["objective"] == "output_tokens_per_s"
    job = read_job(record, ENGINES)
    assert isinstance(job.work, ServeSpec)
    assert (job.work.engine_version, job.work.loads) == ("0.32.0", task.spec.serve.loads)
    assert job.candidate == {"max_num_seqs": 8}


def test_a_weights_file_is_stored_in_the_record_and_a_folder_is_not(experience: Experience, tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.touch()
    for place, (weights, reported) in enumerate([(file, str(file)), (tmp_path, None)]):
        task = serving(Load(concurrency=4))
        work = replace(task.spec.serve, weights=str(weights))
        experience.save(str(place), tasks.platform(replace(task, spec=replace(task.spec, work=work))), [trial(0)])
        (record,) = json.loads(f"[{(experience.folder / f'{place}.jsonl').read_text().strip()}]")
        assert record["serve"].get("weights") == reported


COMMAND = ("torchrun", "pretrain_gpt.py", "--wandb-key", "a-secret-of-a-user")


@pytest.mark.parametrize(
    ("more", "work"),
    [
        ((), {}),
        (("--transformer-impl", "local"), {}),
        (("--moe-token-dispatcher-type", "flex", "--overlap-grad-reduce", "--overlap-param-gather"), {}),
        (("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"), {"settings": {"hidden_dropout": 0.1}}),
        ((), {"engine_version": "0.14.0", "implementation": "local"}),
    ],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_record_has_the_settings_of_a_command_and_not_the_command(
    experience: Experience, more: tuple[str, ...], work: dict[str, Any], devices: int
) -> None:
    """Its predictions are those of the job with the command. A record with a command, as of older files, is skipped."""
    model = replace(tasks.EXPERTS, mtp_num_layers=1)
    task = tasks.task(model, devices=devices, command=(*COMMAND, *more), **work)
    knobs = {"data_parallel_size": devices, "use_distributed_optimizer": True, "micro_batch_size": 1}
    done = replace(trial(0), candidate=tasks.candidate(**knobs))
    path = experience.save("one", tasks.platform(task), [done])
    assert path is not None
    assert "secret" not in path.read_text()
    (record,) = experience.records(tasks.CHIP, "megatron")
    job = read_job(record, ENGINES)
    predictions = []
    for each in (task, replace(task, spec=replace(task.spec, work=job.work))):
        platform = tasks.platform(each)
        columns = canonical(candidate_columns(platform, job.candidate), platform.engine.merges(each))
        predictions.append(predict_columns(platform, columns).row(0))
    assert predictions[0] == predictions[1]
    assert job.work.command is None
    record["measured"]["step_time_s"] = predictions[0].step_time_s
    of_old_file = {**record, "train": {**record["train"], "command": list(COMMAND)}}
    counts = [
        len(past([each], tasks.CHIP, LoadedPlugins.of({}), ENGINES["megatron"], task.spec.objective).time)
        for each in (record, of_old_file)
    ]
    assert counts == [1, 0]


@pytest.mark.parametrize(
    ("task", "done"),
    [
        (tasks.task(tasks.DENSE), trial(0, TrialState.FAILED)),
        (tasks.task(mixed(tasks.DENSE, {"window": 128}, 1)), trial(0)),
        (serving(Load(concurrency=1), Load(concurrency=8)), trial(0)),
    ],
    ids=["no measurement", "a model that a record cannot describe", "several loads"],
)
def test_what_a_record_cannot_describe_leaves_no_experience(experience: Experience, task: Task, done: Trial) -> None:
    assert experience.save("one", tasks.platform(task), [done]) is None
    assert not experience.folder.exists()


def test_auto_means_the_preferred_value_of_a_plugin() -> None:
    preferred = PreferredSetting(setting="engine_args.block-size", value=128, reason="kernels need it")
    plugins = loaded(a=advising(TaskAdvice(preferred=(preferred,))), x=plugin(tasks.CHIP))
    job = replace(spec(chip="test-chip", nodes=2), work=ServeSpec(engine="vllm", loads=()))

    def discovered(value: object) -> Spec:
        return completed(replace(job, space={} if value is None else {"block_size": value}), plugins).task.spec

    assert discovered(None).serve.engine_args == {"block-size": 128}
    assert discovered("auto").space == {"block_size": (128,)}
    assert discovered("auto").serve.engine_args == {}
    assert discovered((16, 32)).space == {"block_size": (16, 32)}


def test_a_plugin_can_leave_out_the_first_requests() -> None:
    plugins = loaded(a=advising(TaskAdvice(warmup=3)), x=plugin(tasks.CHIP))
    job = spec(chip="test-chip", nodes=2)
    loads = tuple(Load(warmup=requests) for requests in (0, 5))
    serve = completed(replace(job, work=ServeSpec(engine="vllm", loads=loads)), plugins).task.spec.serve
    assert [load.warmup for load in serve.loads] == [3, 5]


def limited_spec(load: dict[str, Any], slo: dict[str, Any], **tuner: Any) -> dict[str, Any]:
    space = {"instances": "auto", "tensor_model_parallel_size": "auto"}
    return {
        "model": LLAMA_8B,
        "cluster": {"chip": "A100-80GB", "devices_per_node": 8},
        "serve": {
            "engine": "vllm",
            "profile": {"input_len": 1024, "output_len": 128, "num_prompts": 128, **load},
            "slo": slo,
        },
        "auto_tuner": {"space": space, **tuner},
    }


def test_candidates_name_the_limits_that_they_exceed() -> None:
    found = api.estimate(limited_spec({"concurrency": 64}, {"tpot_s": {"p99": 0.012}}), top=100)
    assert {tuple(each) for each in [each["slo"] for each in found.candidates]} == {(), ("tpot_s.p99",)}
    assert all(each["tpot_s"]["p99"] <= 0.012 for each in found.candidates if not each["slo"])
    assert (found.unmet, "slo" in api.estimate(limited_spec({}, {})).candidates[0]) == ("", False)


def test_if_no_candidate_keeps_them_the_closest_is_named() -> None:
    found = api.estimate(limited_spec({"concurrency": 128}, {"tpot_s": {"p99": 0.015}}), top=100)
    assert all(each["slo"] for each in found.candidates)
    closest = min(each["tpot_s"]["p99"] for each in found.candidates)
    assert f"tpot_s.p99 ~{closest:.3g} s of 0.015 s" in found.unmet


def test_limits_that_nothing_keeps_end_the_estimate() -> None:
    with pytest.raises(NothingFits, match=r"tpot_s\.p99"):
        api.estimate(limited_spec({"concurrency": 64}, {"tpot_s": {"p99": 0.0001}}))


def test_the_defaults_of_the_engine_are_shown_next_to_the_baseline() -> None:
    data = limited_spec({}, {})
    found = api.estimate(data)
    assert found.defaults["candidate"]["instances"] == 1
    assert found.baseline["candidate"]["instances"] == 8
    assert found.baseline["output_tokens_per_s"] > found.defaults["output_tokens_per_s"]
    data |= {"model": "zai-org/GLM-4.5-Air-AWQ", "cluster": {"chip": "RTX-3090", "devices_per_node": 8}}
    data["auto_tuner"]["space"]["pipeline_model_parallel_size"] = "auto"
    assert api.estimate(data, top=1).defaults is None  # TP 4, which divides blocks of weights


def test_weights_are_the_model_if_the_spec_has_no_other(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"vocab_size": 1000}))
    data = limited_spec({}, {})
    data["serve"]["weights"] = str(tmp_path)
    del data["model"]
    assert api.estimate(data).candidates


def problem(memory_bytes: int | None = None) -> Problem:
    requested = spec()
    cluster = replace(requested.cluster, memory_bytes_per_device=memory_bytes)
    return build_problem(replace(requested, cluster=cluster), loaded(x=plugin(tasks.CHIP, 8)), ENGINE)


def test_the_rule_of_thumb_chooses_a_candidate_that_fits_if_one_does() -> None:
    found = problem()
    less = problem(int(float(found.predictions.device_used_bytes[found.row_of(found.baseline)])) - 1)
    assert less.predictions.fits[less.row_of(less.baseline)]


def test_plans_list_candidates_without_a_margin_of_memory_last_unless_the_user_set_the_budget() -> None:
    found = problem()
    order = rows_by_time(found)
    used = found.predictions.device_used_bytes[order]
    capacity_bytes = float(np.median(used)) / PLANNED_SHARE
    small_device = replace(found, predictions=replace(found.predictions, capacity_bytes=capacity_bytes))
    has_margin = used <= np.median(used)
    assert 0 < has_margin.sum() < order.size
    assert rows_by_time(small_device).tolist() == [*order[has_margin], *order[~has_margin]]
    spec = replace(found.task.spec, cluster=replace(found.task.spec.cluster, memory_bytes_per_device=2**30))
    budget = replace(small_device, platform=replace(found.platform, task=replace(found.task, spec=spec)))
    assert rows_by_time(budget).tolist() == order.tolist()


def test_a_baseline_that_is_predicted_not_to_fit_is_tried_with_a_reason() -> None:
    found = problem()
    used = float(found.predictions.device_used_bytes[found.row_of(found.baseline)])
    assert crowded_baseline_text(found) == ""
    small_device = replace(found, predictions=replace(found.predictions, capacity_bytes=used - 1))
    assert f"{used / 2**30:.4g} of" in crowded_baseline_text(small_device)


def test_a_usual_candidate_that_is_about_as_fast_is_recommended_and_listed_by_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = problem()
    first, second = rows_by_time(found)[:2]
    monkeypatch.setattr(
        type(ENGINE.plans), "unusual", lambda _plans, _task, _columns, rows: 1.0 * (rows.step_time_s == 1)
    )
    step_time_s = 10 + found.predictions.step_time_s
    step_time_s[first] = 1
    for faster, expected in ((0.5, second), (1.5, first)):
        step_time_s[second] = 1 + faster * UNUSUAL_SHARE
        changed = replace(found, predictions=replace(found.predictions, step_time_s=step_time_s))
        assert rows_by_time(changed)[:2].tolist() == [first, second]
        assert recommended_row(changed) == expected


def test_a_baseline_that_the_spec_excludes_comes_last() -> None:
    requested = replace(spec(), space={"micro_batch_size": (4,)})
    found = build_problem(requested, loaded(x=plugin(tasks.CHIP, 8)), ENGINE)
    assert found.baseline.as_dict()["micro_batch_size"] != 4
    assert rows_by_time(found)[-1] == found.row_of(found.baseline)
