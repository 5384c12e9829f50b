"""`flag estimate`: what is listed, what one candidate is told in full, and job records."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import FLAG, Project, Ran

Flag = Callable[..., Ran]
LIMITS = {
    "compute",
    "memory",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "bubble",
    "pipeline exchange",
    "gradient exchange",
    "optimizer",
}
MODEL = {
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 11264,
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_moe_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_first_dense_layers": 1,
}
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
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def test_candidates_are_numbered_and_each_says_what_limits_it(flag: Flag, project: Project) -> None:
    listed = json.loads(flag("estimate", project.spec(), "--json").out)
    assert [each["number"] for each in listed] == list(range(1, len(listed) + 1))
    assert {each["limit"] for each in listed} <= LIMITS
    table = flag("estimate", project.spec())
    assert "limited by" in table.out
    assert "baseline: " in table.err


def test_one_candidate_is_explained_by_its_number_in_the_list(flag: Flag, project: Project) -> None:
    spec = project.spec()
    second = json.loads(flag("estimate", spec, "--json").out)[1]
    told = json.loads(flag("estimate", spec, "--explain", "2", "--json").out)
    assert {key: told[key] for key in second} == second
    assert json.loads(flag("estimate", spec, "--explain", "2", "--top", "1", "--json").out) == told
    baseline = json.loads(flag("estimate", spec, "--explain", "baseline", "--json").out)
    assert "number" not in baseline
    assert flag("estimate", spec, "--explain", "baseline").out.startswith("The baseline on 2 x cpu: ")


@pytest.mark.parametrize("wrong", ["0", "-1", "first", "99999"])
def test_a_number_that_is_in_no_list_is_wrong_usage(flag: Flag, project: Project, wrong: str) -> None:
    ran = flag("estimate", project.spec(), "--explain", wrong)
    assert ran.code == 2
    assert "--explain" in ran.err


def test_a_job_is_explained_with_the_table_of_its_model(flag: Flag, tmp_path: Path) -> None:
    file = jobs(tmp_path, {**JOB, "id": "other"}, JOB)
    told = json.loads(flag("estimate", "--jobs", file, "--explain", "moe", "--json").out)
    assert (told["id"], told["chip"], told["devices"]) == ("moe", "H200", 8)
    assert told["settings"]["moe_token_dispatcher_type"] == "flex"
    text = flag("estimate", "--jobs", file, "--explain", "moe").out
    lines = [line.split() for line in text.splitlines()]
    assert ["Embedding", "0.3112", "1", "0.3112"] in lines
    assert ["MLA", "0.0138", "27", "0.3716"] in lines
    assert ["MoE", "0.5711", "26", "14.8482"] in lines
    assert ["MLP", "0.0692", "1", "0.0692"] in lines
    assert ["Total", "15.9113"] in lines
    memory = told["memory"]
    weights, kept = memory["static_gib"] * 1024, memory["activation_gib"] * 1024
    assert f"weight and optimizer={weights:.2f} MB, activation={kept:.2f} MB, total={weights + kept:.2f} MB" in text
    assert "Shared Experts" in text
    assert f"Limited by: {told['limit']}" in text


def test_a_job_that_is_not_there_and_one_that_is_not_known_are_told_apart(flag: Flag, tmp_path: Path) -> None:
    file = jobs(tmp_path, {**JOB, "cluster": {**JOB["cluster"], "chip": "X1"}})
    assert flag("estimate", "--jobs", file, "--explain", "nobody").code == 2
    assert (
        flag("estimate", "--jobs", file, "--explain", "moe").out == "unknown: no installed plugin knows the chip 'X1'\n"
    )


def test_jobs_of_several_tasks_are_answered_in_their_order_as_if_alone(flag: Flag, tmp_path: Path) -> None:
    other = {**JOB, "train": {**JOB["train"], "global_batch_size": 128}}
    wrong = {**JOB, "candidate": {"tensor_model_parallel_size": 3}}
    split = {**JOB, "candidate": {"pipeline_model_parallel_size": 4, "recompute_granularity": "selective"}}
    many = [{**record, "id": str(n)} for n, record in enumerate([JOB, other, wrong, JOB, split, other, JOB])]
    together = answers(flag("estimate", "--jobs", jobs(tmp_path, *many)))
    alone = [answers(flag("estimate", "--jobs", jobs(tmp_path, record)))[0] for record in many]
    assert together == alone
    assert [each["status"] for each in together] == ["ok", "ok", "invalid", "ok", "ok", "ok", "ok"]


def test_a_rank_is_told_what_its_own_pipeline_stage_holds(flag: Flag, tmp_path: Path) -> None:
    uneven = {**JOB, "candidate": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}}
    file = jobs(tmp_path, {**uneven, "rank": 3}, {**uneven, "rank": 4})
    first, last = (answer["rank"] for answer in answers(flag("estimate", "--jobs", file)))
    assert (first["rank"], last["rank"]) == (3, 4)
    for figure in first.keys() - {"rank"}:
        assert 0 < first[figure] < last[figure]
    assert set(first) == {
        "rank",
        "static_gib",
        "peak_allocated_gib",
        "reserved_gib",
        "device_used_gib",
        "compute_time_s",
        "optimizer_time_s",
    }


def test_settings_and_notes_of_a_record_change_what_is_predicted(flag: Flag, tmp_path: Path) -> None:
    plain = {**JOB, "candidate": {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}}
    told = {**plain, "train": {**JOB["train"], "notes": "no overlap"}}
    layout = {**plain, "candidate": {**plain["candidate"], "pipeline_model_parallel_layout": "Et*6|t*7|t*7|t*7L"}}
    wrong = {**plain, "candidate": {**plain["candidate"], "pipeline_model_parallel_layout": "Et*6|t*7|t*7|t*8L"}}
    nobody = {**plain, "candidate": {**plain["candidate"], "pipeline_schedule": "zigzag"}}
    found = answers(flag("estimate", "--jobs", jobs(tmp_path, plain, told, layout, wrong, nobody)))
    assert [each["status"] for each in found] == ["ok", "ok", "ok", "invalid", "unknown"]
    exposed = [each["time"]["dp_comm_exposed_s"] for each in found[:2]]
    assert exposed[0] < exposed[1]
    assert "num_layers is 27" in found[3]["reason"]


def test_a_note_does_not_make_a_record_illegal_but_a_setting_does(flag: Flag, tmp_path: Path) -> None:
    noted = {**JOB, "train": {**JOB["train"], "notes": "tp-comm-overlap"}}
    given = {**JOB, "candidate": {**JOB["candidate"], "tp_comm_overlap": True}}
    found = answers(flag("estimate", "--jobs", jobs(tmp_path, noted, given)))
    assert [each["status"] for each in found] == ["ok", "invalid"]
    assert "tp_comm_overlap needs sequence_parallel" in found[1]["reason"]


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


def test_a_schedule_that_no_trial_can_run_is_predicted_all_the_same(flag: Flag, project: Project) -> None:
    schedule = project.spec(train={"settings": {"pipeline_schedule": "zb-h1"}})
    assert flag("estimate", schedule).code == 0
    tuned = flag("tune", schedule, "--run-dir", str(project.run_dir))
    assert (tuned.code, tuned.out) == (2, "")
    assert "train.settings.pipeline_schedule = 'zb-h1'" in tuned.err
    assert not (project.run_dir / "trials").exists()


def test_unknown_setting_names_the_nearest(flag: Flag, project: Project) -> None:
    ran = flag("estimate", project.spec(train={"settings": {"overlap_grad_reduction": True}}))
    assert ran.code == 2
    assert "train.settings.overlap_grad_reduction" in ran.err
    assert "overlap_grad_reduce" in ran.err.split("did you mean")[1]
