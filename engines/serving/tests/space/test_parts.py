"""The devices of a task, programs and their versions, sizes of weights and of requests."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_serving.space.hardware import longest_request, max_in_flight
from flagcore_serving.space.weights import cache_bytes_per_token, min_devices, parameters

from engines.serving.tests.engines.tasks import serving
from flagcore.domain.serving import Load
from flagcore.errors import NoDevice
from flagcore.vendorkit import programs
from tests.product.tasks import DENSE


def test_the_longest_request_and_the_most_in_flight_are_over_all_loads() -> None:
    loads = (
        Load(input_len=100, output_len=10, concurrency=4),
        Load(input_len=50, output_len=10, prefix_len=60, range_spread=0.1, request_rate=2.0, num_prompts=7),
    )
    assert longest_request(loads, None) == 126
    assert max_in_flight(loads) == 7


def test_weights_and_cache_are_counted_by_shape() -> None:
    llama = replace(
        DENSE,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
    )
    assert parameters(llama) == pytest.approx(8.03e9, rel=0.001)  # Llama 3.1 8B
    assert cache_bytes_per_token(llama, 2.0) == 131072
    assert min_devices(serving("vllm", model=llama, memory=16 * 2**30)) == 2
    assert min_devices(serving("vllm", model=llama, memory=80 * 2**30)) == 1
    assert min_devices(serving("vllm", model=llama, memory=2**30, devices=4)) == 4


def test_the_interpreter_of_a_script_is_read_in_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    assert programs.interpreter(str(script)) == sys.executable
    script.write_text("#!/bin/sh\nexec vllm\n")
    assert programs.interpreter(str(script)) is None
    script.write_bytes(b"\x7fELF\x02\x01")
    assert programs.interpreter(str(script)) is None
    assert programs.interpreter(sys.executable) == sys.executable
    assert programs.package_folders(str(script)) == ()


def test_the_version_of_a_package_comes_from_the_interpreter() -> None:
    assert programs.package_version(sys.executable, "no-such-package", "pytest") == pytest.__version__
    assert programs.package_version(sys.executable, "no-such-package") == ""


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.11.2rc1+cpu", (0, 11, 2)), ("v0.5", (0, 5, 0)), ("nightly-5b8c", None), ("", None)]
)
def test_a_release_is_read_from_unusual_versions(version: str, numbers: tuple[int, ...] | None) -> None:
    assert programs.release(version) == numbers


def test_a_missing_program_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no-such-engine"):
        programs.find_command(serving("vllm", command=("no-such-engine", "serve")).spec, ("vllm", "serve"))
    (tmp_path / "run").touch(mode=0o755)
    spec = serving("vllm", command=("./run", "x"), directory=str(tmp_path)).spec
    assert programs.find_command(spec, ("vllm",)) == (str(tmp_path / "run"), "x")
