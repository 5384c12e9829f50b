"""What trials were measured at, as files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.job import Load, ServeSpec
from flagcore_testing.examples import mixed

from flagcore.api.jobs import past
from flagcore.domain.model import Attention
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial, TrialState
from flagcore.plugins import LoadedPlugins
from flagcore.spec.jobs import read_job
from flagcore.tuner.experience import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.stages.build import canonical
from flagcore.tuner.stages.predict import predict_columns
from tests.product import tasks
from tests.product.tasks import ENGINES


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
        (tasks.task(mixed(tasks.DENSE, Attention(window=128), 1)), trial(0)),
        (serving(Load(concurrency=1), Load(concurrency=8)), trial(0)),
    ],
    ids=["no measurement", "a model that a record cannot describe", "several loads"],
)
def test_what_a_record_cannot_describe_leaves_no_experience(experience: Experience, task: Task, done: Trial) -> None:
    assert experience.save("one", tasks.platform(task), [done]) is None
    assert not experience.folder.exists()
