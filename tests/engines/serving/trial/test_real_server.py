"""The trial program with llama.cpp's own server and a model of random weights."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from flagcore.contracts import Platform
from flagcore.domain.model import Model
from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from tests.engines.serving.trial import trials
from tests.engines.serving.trial.test_misbehaving_servers import all_gone

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")

pytestmark = pytest.mark.slow

MAKER = Path(__file__).parents[4] / "examples" / "tiny_gguf.py"
MODEL = Model(
    name="tiny",
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=1000,
)
SHAPE = ("--layers=2", "--hidden=128", "--heads=4", "--kv-heads=2", "--ffn=256", "--vocab=1000", "--context=1024")
LOAD = Load(input_len=100, output_len=30, num_prompts=8, concurrency=8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, str(MAKER), str(file), *SHAPE], check=True, timeout=60)
    return file


def platform(folder: Path, weights: Path, **arguments: object) -> Platform:
    """The played server's platform with the real one in its place."""
    where = trials.platform(folder, "unused", model=MODEL, loads=(LOAD,))
    work = dataclasses.replace(where.task.spec.serve, command=None, weights=str(weights), **arguments)
    spec = dataclasses.replace(where.task.spec, work=work)
    return dataclasses.replace(where, task=dataclasses.replace(where.task, spec=spec))


def test_two_instances_answer_all_requests_and_run_the_requested_settings(weights: Path, tmp_path: Path) -> None:
    requested = {"instances": 2, "parallel": 4, "threads": 1, "ubatch_size": 64, "kv_cache_type": "q8_0"}
    done = trials.run_here(platform(tmp_path, weights, repeats=2), tmp_path, flash_attention="on", **requested)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    effective = done.measurement.effective
    assert {knob: effective[knob] for knob in requested if knob in effective} == {
        k: v for k, v in requested.items() if k != "instances"
    }
    assert effective["flash_attention"] == "on"
    assert len(done.measurement.step_times_s) == 2
    assert done.measurement.versions["llamacpp"]
    figures = done.measurement.figures
    assert figures["ttft_s.p50"] > 0
    assert figures["kv_cache_tokens"] == 2 * 4 * 256
    assert 10 * 2**20 < (done.measurement.device_used_bytes or 0) < 2**30
    assert figures["output_tokens_per_s_per_device"] == pytest.approx(figures["output_tokens_per_s"] / 2)
    assert all_gone(weights.parent)


def test_each_slot_holds_a_whole_request_for_any_number_of_slots(weights: Path, tmp_path: Path) -> None:
    done = trials.run_here(platform(tmp_path, weights), tmp_path, parallel=8)
    assert done.state is TrialState.MEASURED, done.reason
