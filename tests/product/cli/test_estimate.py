"""`flag estimate`: the list, one candidate in full, and job records."""

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore.domain.prediction import PART_NAMES
from tests.product.cli.conftest import FLAG, Answer, Flag, Project, Ran
from tests.product.tasks import LLAMA_8B

LIMITS = {"memory", *PART_NAMES.values()}
MODEL = "deepseek-ai/DeepSeek-V2-Lite"
VIRTUAL = "virtual_pipeline_model_parallel_size"
JOB: dict[str, Any] = {
    "id": "moe",
    "kind": "train",
    "model": MODEL,
    "cluster": {"chip": "H200", "devices": 8, "devices_per_node": 8},
    "train": {"seq_length": 4096, "global_batch_size": 64, "precision": "bf16", "notes": "DeepEP"},
    "candidate": {"expert_model_parallel_size": 8, "use_distributed_optimizer": True},
}


def jobs(folder: Path, *records: dict[str, Any]) -> str:
    (folder / "jobs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "jobs.jsonl")


def answers(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.worked().out.splitlines()]


@pytest.fixture
def answered(flag: Flag, tmp_path: Path) -> Answer:
    """Return the answers to job records."""
    return lambda *records: answers(flag("estimate", "--jobs", jobs(tmp_path, *records)))


def job(**sections: Any) -> dict[str, Any]:
    """Return JOB with some keys of its sections replaced."""
    return JOB | {name: {**JOB[name], **part} if isinstance(part, dict) else part for name, part in sections.items()}


def test_candidates_are_numbered_and_report_their_bottleneck(flag: Flag, answer: Answer, project: Project) -> None:
    listing = answer("estimate", "--all", project.spec())
    assert [each["number"] for each in listing] == list(range(1, len(listing) + 1))
    assert {each["limit"] for each in listing} <= LIMITS
    table = flag("estimate", project.spec())
    assert "limited by" in table.out
    assert "baseline: " in table.err
    assert table.err.count("(80% of plans: ") == 1


def test_a_job_that_can_only_be_predicted_has_no_command_that_runs_it(flag: Flag, tmp_path: Path) -> None:
    model = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    train = {"engine": "megatron", "seq_length": 64, "global_batch_size": 4, "precision": "bf16"}

    def said(**lengths: Any) -> tuple[bool, bool, str]:
        data = {"model": model, "cluster": {"chip": "cpu", "devices_per_node": 2}, "train": {**train, **lengths}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
        text = flag("estimate", str(tmp_path / "job.yaml")).worked().err
        return "flag tune" in text, "flag export" in text, re.findall(r"\d+ samples of \d+ tokens", text)[0]

    assert said() == (True, True, "4 samples of 64 tokens")
    assert said(lengths={"mean": 16}) == said(adapter={"rank": 4}) == (False, False, "4 samples of 64 tokens")


@pytest.mark.costly
def test_a_baseline_that_is_predicted_not_to_fit_is_explained_with_the_reason_why_it_is_tried(
    flag: Flag, tmp_path: Path
) -> None:
    model = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    data = {
        "model": {**model, "vocab_size": 128256},
        "cluster": {"chip": "H100-SXM", "devices_per_node": 8},
        "train": {"engine": "deepspeed", "seq_length": 4096, "global_batch_size": 8, "precision": "bf16"},
        "auto_tuner": {
            "space": {"zero_stage": [3], "offload_optimizer": ["none"], "micro_batch_size": [1]},
            "baseline": {"zero_stage": 0},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
    explained = flag("estimate", str(tmp_path / "job.yaml"), "--explain", "baseline").worked()
    assert explained.out.startswith("Baseline on 8 x H100-SXM: ZeRO 0, ")
    assert "the baseline is predicted to need" in explained.err
    best = flag("estimate", str(tmp_path / "job.yaml"), "--explain", "1").worked()
    assert "the baseline is predicted to need" not in best.err


@pytest.mark.costly
def test_one_candidate_is_explained_by_its_number_in_the_list(flag: Flag, answer: Answer, project: Project) -> None:
    spec = project.spec()
    second = answer("estimate", spec, "--all")[1]
    output = answer("estimate", spec, "--explain", "2")
    assert {key: output[key] for key in second} == second
    assert "number" not in answer("estimate", spec, "--explain", "baseline")
    assert flag("estimate", spec, "--explain", "baseline").out.startswith("Baseline on 2 x cpu: ")
    report = answer("explain", spec, "mbs=1, tp=2")
    assert answer("estimate", spec, "--explain", "mbs=1, tp=2") == report
    assert answer("estimate", spec, "--like", "--tensor-model-parallel-size 2 --micro-batch-size 1") == report
    unknown = flag("estimate", spec, "--evidence")  # no run on this chip is published
    assert (unknown.code, unknown.out, " cpu " in unknown.err) == (0, "", True)


def test_a_plan_prints_its_assumptions_to_stdout(flag: Flag, tmp_path: Path) -> None:
    train = {"engine": "megatron", "seq_length": 2048, "global_batch_size": 64, "precision": "bf16"}
    file = tmp_path / "plan.yaml"
    job = {"model": LLAMA_8B, "cluster": {"chip": "H100-SXM", "nodes": 2}, "train": train}
    file.write_text(yaml.safe_dump(job))
    best = json.loads(flag("estimate", str(file), "--top", "1", "--json").out)[0]
    assert best["assumed"].items() >= {"overlap_grad_reduce": True, "cross_entropy_loss_fusion": True}.items()
    table = flag("estimate", str(file), "--top", "1").out
    assert all(name in table for name in ("transformer_engine", *best["assumed"]))
    file.write_text(yaml.safe_dump(job | {"train": {**train, "implementation": "local"}}))
    assert "assumed" not in json.loads(flag("estimate", str(file), "--top", "1", "--json").out)[0]


def test_a_candidate_is_explained_with_the_table_of_its_model(flag: Flag, tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    train = {**JOB["train"], "engine": "megatron", "settings": {"moe_token_dispatcher_type": "flex"}}
    spec = {"model": MODEL, "cluster": {"chip": "H200", "devices_per_node": 8}, "train": train}
    space = {"expert_model_parallel_size": 8, "use_distributed_optimizer": True, "micro_batch_size": 1}
    del train["notes"]
    file.write_text(json.dumps({**spec, "auto_tuner": {"space": space}}))
    output = json.loads(flag("estimate", str(file), "--explain", "1", "--json").out)
    assert (output["number"], output["chip"], output["devices"]) == (1, "H200", 8)
    text = flag("estimate", str(file), "--explain", "1").out
    assert text.startswith("Candidate 1 on 8 x H200: ")
    lines = [line.split() for line in text.splitlines()]
    assert ["Embedding", "0.2097", "1", "0.2097"] in lines
    assert ["MLA", "0.0138", "27", "0.3716"] in lines
    assert ["MoE", "0.5711", "26", "14.8482"] in lines
    assert ["MLP", "0.0672", "1", "0.0672"] in lines
    assert ["Total", "15.7065"] in lines
    memory = output["memory"]
    weights, stored = memory["static_gib"] * 1024, memory["activation_gib"] * 1024
    assert f"weight and optimizer={weights:.2f} MB, activation={stored:.2f} MB, total={weights + stored:.2f} MB" in text
    assert "Shared Experts" in text
    assert f"Bottleneck: {output['limit']}" in text
    total = next(line for line in lines if line[:1] == ["Total"] and "," in line[1])
    assert sum(map(float, total[2:])) == pytest.approx(memory["peak_allocated_gib"], abs=0.003)
    assert any(line[:1] in (["temporary"], ["freed"]) for line in lines)


@pytest.mark.slow
def test_jobs_of_several_tasks_are_answered_in_their_order_as_if_alone(flag: Flag, tmp_path: Path) -> None:
    other_record = job(train={"global_batch_size": 128})
    invalid = {**JOB, "candidate": {"tensor_model_parallel_size": 3}}
    split = {**JOB, "candidate": {"pipeline_model_parallel_size": 4, "recompute_granularity": "selective"}}
    many = [
        {**record, "id": str(n)} for n, record in enumerate([JOB, other_record, invalid, JOB, split, other_record, JOB])
    ]
    combined = answers(flag("estimate", "--jobs", jobs(tmp_path, *many)))
    assert combined == [answers(flag("estimate", "--jobs", jobs(tmp_path, record)))[0] for record in many]
    assert [each["status"] for each in combined] == ["ok", "ok", "invalid", "ok", "ok", "ok", "ok"]


def test_a_rank_has_the_weights_of_its_pipeline_stage(answered: Answer) -> None:
    uneven = {**JOB, "candidate": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}}
    first, last = (answer["rank"] for answer in answered({**uneven, "rank": 3}, {**uneven, "rank": 4}))
    assert (first["rank"], last["rank"]) == (3, 4)
    sizes = {f"{name}_gib" for name in ("static", "peak_allocated", "reserved", "device_used")}
    assert set(first) == {"rank", "compute_time_s", "optimizer_time_s", *sizes}
    assert all(0 < first[figure] < last[figure] for figure in first.keys() - {"rank"})


def test_settings_and_notes_of_a_record_change_the_prediction(answered: Answer) -> None:
    staged = {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}
    plain = {**JOB, "candidate": staged}
    noted = {**job(train={"notes": "no overlap"}), "candidate": staged}
    layout, invalid, unknown = (
        {**JOB, "candidate": {**staged, **more}}
        for more in (
            {"pipeline_model_parallel_layout": "Et*6|t*7|t*7|t*7L"},
            {"pipeline_model_parallel_layout": "Et*6|t*7|t*7|t*8L"},
            {"pipeline_schedule": "zigzag"},
        )
    )
    result = answered(plain, noted, layout, invalid, unknown)
    assert [each["status"] for each in result] == ["ok", "ok", "ok", "invalid", "unknown"]
    assert result[0]["time"]["dp_comm_exposed_s"] < result[1]["time"]["dp_comm_exposed_s"]
    assert "num_layers is 27" in result[3]["reason"]


def test_a_note_does_not_make_a_record_illegal_but_a_setting_does(answered: Answer) -> None:
    noted, given = answered(job(train={"notes": "tp-comm-overlap"}), job(candidate={"tp_comm_overlap": True}))
    assert (noted["status"], given["status"]) == ("ok", "invalid")
    assert "tp_comm_overlap needs sequence_parallel" in given["reason"]


@pytest.mark.costly
def test_each_line_of_a_pipe_is_answered_before_the_next_is_written(project: Project) -> None:
    command = (*FLAG, "estimate", "--jobs", "-")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=project.folder
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name in ("first", "second"):
            process.stdin.write(json.dumps({**JOB, "id": name}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == name
        process.stdin.close()
    assert process.returncode == 0


def test_a_schedule_without_a_trial_program_is_still_predicted(flag: Flag, project: Project) -> None:
    schedule = project.spec(train={"settings": {"pipeline_schedule": "zb-h1"}})
    assert flag("estimate", schedule).code == 0
    flag("tune", schedule, "--run-dir", str(project.run_dir)).refused(2, "train.settings.pipeline_schedule = 'zb-h1'")
    assert not (project.run_dir / "trials").exists()


def test_a_misspelt_chip_gets_suggestions(flag: Flag, project: Project, answered: Answer) -> None:
    nearest = "did you mean H100-NVL or H100-PCIe or H100-SXM?"
    for chip, arguments in (("H100-X", ()), ("cpu", ("--chip", "H100-X"))):
        flag("estimate", project.spec(cluster={"chip": chip}), *arguments).refused(4, nearest)
    (answer,) = answered(job(cluster={"chip": "H100-X"}))
    assert answer["status"] == "unknown"
    assert nearest in answer["reason"]


def test_a_misspelt_section_is_named_before_the_chip_that_is_missing_without_it(flag: Flag, tmp_path: Path) -> None:
    text = {"model": "Qwen/Qwen3-8B", "clutser": {"chip": "H20"}, "serve": {"engine": "vllm"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(text))
    flag("estimate", str(tmp_path / "own.yaml")).refused(2, "clutser", "cluster")


@pytest.mark.parametrize(
    ("cluster", "train", "words"),
    [
        ({"chip": "C550", "devices": 16}, {}, ("network between nodes of C550", "nic_bytes_per_second")),
        ({"chip": "MLU590-H8"}, {}, ("peak rate of MLU590-H8 in bf16", "link", "`flag calibrate`")),
        ({"chip": "C588"}, {}, ("memory bandwidth of C588", "`flag calibrate`")),
        ({"chip": "MI455X"}, {"precision": "fp8"}, ("MI455X lists no rate in fp8", "use train.precision", "bf16")),
    ],
)
def test_a_job_without_a_predictable_time_reports_what_is_missing_and_how_to_get_it(
    cluster: dict[str, Any], train: dict[str, Any], words: tuple[str, ...], answered: Answer
) -> None:
    (answer,) = answered(job(cluster=cluster, train=train))
    assert answer["status"] == "ok"
    assert "step_time_s" not in answer
    assert answer["memory"]["peak_allocated_gib"] > 0
    assert all(word in answer["reason"] for word in words)


def test_candidates_without_a_time_have_a_reason(flag: Flag, answer: Answer, project: Project) -> None:
    spec = project.spec(cluster={"chip": "C588", "devices_per_node": 2, "memory_per_device": None})
    reason = "peak rate of C588 in bf16"
    assert reason in answer("estimate", spec)[0]["reason"]
    output = flag("estimate", spec).err
    assert output.startswith("Candidates with the least memory on 2 x C588:")
    assert all(text in output for text in (" have no predicted time", reason, "calibrate"))
    assert "fastest" not in output


def test_servers_without_a_time_have_their_own_columns_and_idle_devices_are_reported(
    flag: Flag, caplog: pytest.LogCaptureFixture
) -> None:
    plan = ("estimate", "--model", "Qwen/Qwen3-0.6B", "--chip", "C600", "--devices", "8", "--top", "1")
    found = flag(*plan).worked()
    assert "~TTFT p50 s" in found.out
    assert "~step s" not in found.out
    assert "the recommended candidate uses 1 of 8 devices" in caplog.text


def test_a_limit_in_short_is_that_limit_and_the_last_line_of_a_plan_keeps_it(flag: Flag, answer: Answer) -> None:
    plan = ("estimate", "--model", "Qwen/Qwen3-8B", "--chip", "H20", "--devices", "1", "--top", "1")
    assert answer(*plan, "--ttft-p99", "1s", "--rate", "2/s") == answer(*plan, "--slo", "p99 ttft 1s", "--rate", "2")
    notes = flag(*plan, "--ttft-p99", "500ms").err
    assert "p99 TTFT too high" in notes.partition("baseline: ")[2].splitlines()[0]
    words = notes.splitlines()[-1].partition(": flag ")[2].split()
    assert words[words.index("--ttft-p99") + 1] == "500ms"
    script = flag(*words, "-o", "-").worked().out
    assert (script[:2], "Qwen/Qwen3-8B" in script) == ("#!", True)


def test_several_engines_are_planned_side_by_side(
    flag: Flag, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"input_len": 512, "output_len": 64, "concurrency": 8, "range_spread": 0.5}
    spec, served = tmp_path / "two.yaml", {"engine": ["sglang", "nope", "vllm"], "profile": load}
    job = {"model": "Qwen/Qwen3-0.6B", "cluster": {"chip": "H20", "devices_per_node": 1}, "serve": served}
    spec.write_text(yaml.safe_dump({**job, "auto_tuner": {"space": {"tensor_model_parallel_size": [1]}}}))
    found = {each["engine"]: each["step_time_s"]["value"] for each in answer("estimate", str(spec))}
    shown = flag("estimate", str(spec)).worked()
    assert "nope: " in shown.err
    assert [line.split()[0] for line in shown.out.splitlines()[-2:]] == sorted(found, key=lambda name: found[name])
    assert found.keys() == {"sglang", "vllm"}
    flag("estimate", str(spec), "--explain", "1").refused(2, "lists several engines")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(spec.read_bytes())))
    assert {each["engine"] for each in answer("estimate", "-")} == found.keys()


def test_sizes_of_the_cluster_replace_those_of_the_spec(answer: Answer, project: Project) -> None:
    plan, sizes = (
        ("estimate", project.spec(), "--all"),
        ("--set", "cluster.nodes=2", "--set", "cluster.devices_per_node=1"),
    )
    assert answer(*plan, "--nodes", "2", "--devices", "1") == answer(*plan, *sizes) != answer(*plan)


def test_if_nothing_fits_the_hardware_and_its_memory_are_reported(flag: Flag, project: Project) -> None:
    space = {"space": {"micro_batch_size": 1, "use_recompute": False}}
    auto = project.spec(cluster={"chip": "auto", "memory_per_device": "1MiB"}, auto_tuner=space)
    completed = flag("explain", auto)
    assert completed.code == 3
    assert "(cluster.memory_per_device): " in completed.err
    assert "; cluster.chip: auto found cpu here; `flag estimate --chip NAME` plans for other hardware" in completed.err
    assert "None" not in completed.err
    spec = project.spec(cluster={"memory_per_device": "1MiB"}, auto_tuner=space)
    assert "auto found" not in flag("estimate", spec).err


def test_knobs_of_a_record_that_do_nothing_and_a_second_use_of_its_id_are_reported(answered: Answer) -> None:
    idle = {"sequence_parallel": True, "use_recompute": False, "recompute_granularity": "full"}
    first, second = answered(JOB, job(candidate=idle))
    assert "warnings" not in first
    assert second["warnings"] == [
        "sequence_parallel = True does nothing: tensor_model_parallel_size is 1",
        "recompute_granularity = 'full' does nothing: use_recompute is False",
        "an earlier record has the id moe",
    ]


def test_indivisible_layers_of_a_record_are_reported_with_the_assumed_split(answered: Answer) -> None:
    splits = ({VIRTUAL: 1}, {VIRTUAL: 2}, {VIRTUAL: 9, "num_layers_in_first_pipeline_stage": 6})
    records = ({**JOB, "candidate": {"pipeline_model_parallel_size": 4, **split}} for split in splits)
    loss, layout, wrong = answered(*records)
    assert "with account_for_loss_in_pipeline_split = True; give" in loss["warnings"][0]
    assert "with pipeline_model_parallel_layout = E" in layout["warnings"][0]
    assert wrong["status"] == "invalid"
    assert "virtual_pipeline_model_parallel_size = 9" in wrong["reason"]


def test_an_assumed_dispatcher_of_experts_over_several_nodes_is_reported(answered: Answer) -> None:
    wide = {"cluster": {"devices_per_node": 4}, "train": {"notes": ""}}
    named, assumed = answered(job(cluster=wide["cluster"]), job(**wide, id="assumed"))
    assert "warnings" not in named
    assert "moe_token_dispatcher_type = flex is assumed" in assumed["warnings"][0]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"chip": "H200"}, "cluster.devices_per_node is missing"),
        ({"chip": "auto", "devices": 8, "devices_per_node": 8}, "cluster.chip = 'auto'"),
        ({"groups": []}, "cluster.groups is not a known key"),
    ],
)
def test_a_cluster_that_no_record_can_have_is_reported(answered: Answer, cluster: dict[str, Any], words: str) -> None:
    (answer,) = answered({**JOB, "cluster": cluster})
    assert answer["status"] == "invalid"
    assert words in answer["reason"]


def test_modules_that_no_candidate_recomputes_are_reported(
    flag: Flag, project: Project, answered: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"settings": {"recompute_modules": "mlp"}}
    assert flag("estimate", project.spec(train=settings)).code == 0
    assert "train.settings.recompute_modules = 'mlp' does nothing" in caplog.text
    caplog.clear()
    space = {"space": {"use_recompute": True, "recompute_granularity": ["selective", "full"]}}
    assert flag("estimate", project.spec(train=settings, auto_tuner=space)).code == 0
    assert "does nothing" not in caplog.text

    unused, used = {"recompute_modules": ["mlp"]}, {"recompute_granularity": "selective"}
    idle, busy = answered(job(candidate=unused), job(id="used", candidate={**unused, **used}))
    assert "recompute_modules = 'mlp' does nothing" in idle.pop("warnings")[0]
    assert "warnings" not in busy
    assert [idle] == answered(JOB)


def test_rules_as_csv_have_a_row_each(flag: Flag, project: Project) -> None:
    heading, *rows = flag("explain", project.spec(), "--format", "csv").out.splitlines()
    assert heading == "rule,removed,message"
    assert all(row.split(",")[1].isdigit() for row in rows)
    assert sum(int(row.split(",")[1]) for row in rows) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((("SPEC", "--explain", wrong), "--explain") for wrong in ("0", "-1", "99999")),
        (("SPEC", "--explain", "1", "--format", "csv"), "--format csv"),
        (("SPEC", "--evidence", "--like", "mbs=1"), "--evidence, --explain, --like and --report"),
        (("SPEC", "--like", ""), "--like ''"),
        (("SPEC", "--explain", "1", "--top", "3"), "--top and --all"),
        (("SPEC", "--engine", "vllm"), "--engine requires --model"),
        *((("SPEC", "--rate", wrong), "--rate") for wrong in ("inf", "nan", "-1")),
        (("--jobs", "JOBS", "--explain", "moe"), "--explain requires SPEC"),
        (("--jobs", "JOBS", "--format", "csv"), "--format requires SPEC"),
        (("--jobs", "JOBS", "--top", "3"), "--top requires SPEC"),
        (("--jobs", "JOBS", "--chip", "H200"), "--chip requires SPEC"),
        (("--jobs", "EMPTY"), "is empty"),
        (("JOBS",), "use --jobs"),
    ],
)
def test_wrong_usage_names_the_option(
    flag: Flag, project: Project, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    files = {"SPEC": project.spec(), "JOBS": jobs(tmp_path, JOB), "EMPTY": str(tmp_path / "empty.jsonl")}
    flag("estimate", *(files.get(each, each) for each in arguments)).refused(2, words)
