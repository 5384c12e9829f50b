"""Commands of the frameworks become specs, and trials change only what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import read_command

from flagcore.api.inputs import open_spec
from flagcore.domain.space import Candidate
from flagcore.errors import LaunchError
from flagcore.plugins import find_engine

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
    engine = find_engine(data["rl"]["engine"], "rl.engine")
    own = {knob.name: data["auto_tuner"]["baseline"].get(knob.name, knob.neutral) for knob in engine.knobs}
    unchanged = engine.launch(platform, Candidate.of(own), "out", for_real=True)
    assert [*unchanged.argv] == data["rl"]["command"]
    argv = engine.launch(platform, Candidate.of({**own, **case["changed"]}), "FOLDER").argv
    assert {*case["words"]} <= {*argv}
    assert not {"--save", "--recompute-granularity", "--actor.gradient_checkpointing_enable"} & {*argv}
    again = engine.reading(platform.task.spec.work).__class__(engine.name, argv, folder).baseline(engine.knobs)
    changed = {knob: value for knob, value in case["changed"].items() if value != "none"}
    assert again | changed == again


@pytest.mark.parametrize("name", LOGS)
def test_times_of_steps_and_of_their_parts_are_read(name: str, folder: Path) -> None:
    case = CASES[name]
    data = spec_of(case, folder).data
    data["auto_tuner"] = {"control": {"train_iters": 3}}
    task = open_spec(data, None, (), plan=True).problem.platform.task
    engine = find_engine(name, "rl.engine")
    lines = [LOGS[name].format(n=n, s=seconds) for n, seconds in enumerate((30.0, 10.0, 11.0))]
    (folder / "stdout.log").write_text("\n".join(("INFO start", *lines, "")))
    found = engine.read(task, Candidate.of({}), str(folder))
    assert (found.step_times_s, found.step_time_s) == ((10.0, 11.0), 10.5)
    parts = {"generation_s": 6.5, "logprobs_s": 1.5, "training_s": 2.0} if name != "trl" else {}
    assert found.figures == parts


def test_processes_need_a_launcher(folder: Path) -> None:
    words = "python train.py --num_generations 4 --per_device_train_batch_size 4 --model_name_or_path Qwen/Qwen3-0.6B"
    data = spec_of({"text": words}, folder).data
    data |= {"cluster": {"chip": "H100-SXM", "devices_per_node": 4}, "auto_tuner": {}}
    platform = open_spec(data, None, (), plan=True).problem.platform
    with pytest.raises(LaunchError, match="accelerate launch"):
        find_engine("trl", "rl.engine").launch(platform, Candidate.of({"micro_batch_size": 1}), "out")
