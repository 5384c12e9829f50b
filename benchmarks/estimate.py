"""Measures how fast one core builds, predicts (memory and time), prunes and ranks spaces.

It runs two spaces of about a million candidates, dense and with experts, with every knob on auto; `flag estimate` on a
space of ten million combinations; and, for comparison, the public estimator llm-analysis on the dense model. Each part
has its own process, so that its peak memory is separate. Seconds are processor time, except `wall_s`. Logs go to
stderr; the last line of stdout is one JSON object.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROUNDS = 3
"""Number of rounds; the fastest one is used, because other load only slows rounds down."""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
PEER = "llm-analysis==0.2.2"
CHIPS = ("H200", "cpu")
"""Chips with measured tables of kernels and collectives; the first one that a plugin supports is used."""

DENSE = {
    "name": "gpt3-175b",
    "num_layers": 96,
    "hidden_size": 12288,
    "ffn_hidden_size": 49152,
    "num_attention_heads": 96,
    "vocab_size": 51200,
    "gated_linear_unit": False,
}
EXPERTS = {
    "name": "qwen3-30b-a3b",
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "vocab_size": 151936,
    "qk_layernorm": True,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
}
SMALL = {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072}
POWERS = [1, 2, 4, 8]
TEN_MILLION = {
    "tensor_model_parallel_size": POWERS,
    "context_parallel_size": [1, 2, 4],
    "micro_batch_size": POWERS,
    "recompute_num_layers": [1, 2],
}
Figures = dict[str, Any]


def main() -> None:
    """Print one JSON object with the results of all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="run one part, in this process")
    parser.add_argument("--tiny", action="store_true", help="small spaces, to test whether it runs")
    parser.add_argument("--build", type=Path, default=Path("build"), help="path of the environment of llm-analysis")
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.tiny) | {"peak_mib": _peak_mib()}))
        return
    figures: Figures = {"machine": f"{_processor()}, {os.cpu_count()} cores", "python": platform.python_version()}
    parts = {part: _child([sys.executable, __file__, "--part", part, *["--tiny"] * options.tiny]) for part in PARTS}
    figures |= {f"{part}_candidates_per_second": parts[part]["candidates_per_second"] for part in ("dense", "moe")}
    peer = _peer(options.build / "llm-analysis")
    ratio = None if peer is None else round(figures["dense_candidates_per_second"] / peer, 1)
    figures |= {"llm_analysis_candidates_per_second": peer, "dense_over_llm_analysis": ratio}
    print(json.dumps(figures | parts))


def space_of(model: Mapping[str, Any], nodes: int, batch: int, space: Mapping[str, Any] | None = None) -> Figures:
    """Return the data of a spec for nodes of eight devices of the best measured chip."""
    return {
        "model": dict(model),
        "cluster": {"chip": _chip(), "nodes": nodes, "devices_per_node": 8, "memory_per_device": "141GiB"},
        "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": batch, "precision": "bf16"},
        "auto_tuner": {"space": dict(space or {})},
    }


def dense(is_tiny: bool) -> Figures:
    """Return the results for a dense model of 96 layers on 768 devices."""
    return _stages(space_of(DENSE | SMALL, 1, 16) if is_tiny else space_of(DENSE, 96, 1536))


def moe(is_tiny: bool) -> Figures:
    """Return the results for a model of 48 layers with 128 experts on 384 devices."""
    return _stages(space_of(EXPERTS | SMALL, 1, 16) if is_tiny else space_of(EXPERTS, 48, 1536))


def ten_million(is_tiny: bool) -> Figures:
    """Return the run time of `flag estimate` from the spec to the answer."""
    from flagcore import api

    data = space_of(DENSE | SMALL, 1, 16, TEN_MILLION) if is_tiny else space_of(DENSE, 96, 1536, TEN_MILLION)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.json")
        spec.write_text(json.dumps(data))
        start = time.perf_counter()
        counts, seconds = _timed(lambda: api.estimate(spec).counts, 1)
        wall_s = time.perf_counter() - start
    figures = {"combinations": counts.combinations, "candidates": counts.candidates}
    return {**figures, "seconds": round(seconds, 2), "wall_s": round(wall_s, 2)}


PARTS: Mapping[str, Callable[[bool], Figures]] = {"dense": dense, "moe": moe, "ten_million": ten_million}


def _stages(data: Figures) -> Figures:
    """Return the seconds of each stage of `flag estimate` and `flag tune`."""
    from flagcore import plugins
    from flagcore.api.inputs import loaded_plugins
    from flagcore.contracts import Problem
    from flagcore.domain.features import PastMeasurements
    from flagcore.spec.convert import parse_spec
    from flagcore.tuner.search_state import SearchState
    from flagcore.tuner.stages.build import build, legality
    from flagcore.tuner.stages.complete import complete_by_plugins
    from flagcore.tuner.stages.predict import predict
    from flagcore.tuner.stages.prune import prune
    from flagcore.tuner.stages.rank import rank, search_context
    from flagcore.tuner.strategies.learned import STRATEGY

    spec = parse_spec(data, file="benchmark", base=Path(), engines=plugins.engines())
    engine = plugins.find_engine(spec.train.engine)
    with loaded_plugins(()) as loaded:
        platform = complete_by_plugins(spec, loaded, engine)
        task = platform.task
        legal = legality(platform)
        pruning = engine.pruning_rules(task)
        no_trials = SearchState(by_candidate={}, repeats=(), baseline=None, best=None)
        space, build_s = _timed(lambda: build(legal.axes, legal.rules, legal.merges), 1)
        predictions, predict_s = _timed(lambda: predict(platform, space), ROUNDS)
        pruned, prune_s = _timed(lambda: prune(space, predictions, pruning), 1)
        problem = Problem(
            platform=platform,
            legality=legal,
            space=space,
            predictions=predictions,
            pruned=pruned,
            baseline=space.candidate(0),
        )
        seen = search_context(problem, no_trials, PastMeasurements.empty())
        _, rank_s = _timed(lambda: rank(STRATEGY, seen), 1)
    return {
        "chip": task.cluster.groups[0].chip.name,
        "combinations": space.combinations,
        "candidates": len(space),
        "fit": int(pruned.open_rows.size),
        "build_s": round(build_s, 2),
        "predict_s": round(predict_s, 2),
        "prune_s": round(prune_s, 2),
        "rank_s": round(rank_s, 2),
        "candidates_per_second": round(len(space) / predict_s),
    }


def _timed(work: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """Return the result of `work` and the seconds of the fastest round."""
    seconds, result = [], None
    for _ in range(rounds):
        result = None  # free the previous result before the next round
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def _peer(folder: Path) -> float | None:
    """Return the candidates per second of llm-analysis in its own environment; None with the reason on stderr."""
    python, job = folder / "bin" / "python", {"model": DENSE, "devices": 768, "batch": 1536, "rounds": ROUNDS}
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        if not (folder / "done").exists():
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(folder)],
                [*pip, "fire"],
                [*pip, "--no-deps", PEER],  # transformers is only needed for a model hub, which is not used
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
            (folder / "done").touch()
        return float(_child([str(python), str(FOLDER / "peer.py"), json.dumps(job)])["candidates_per_second"])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
        message = (getattr(error, "stderr", None) or "").strip().splitlines()[-1:]
        print(f"{PEER} is not measured: {' '.join([str(error), *message])}", file=sys.stderr)
        return None


def _child(command: list[str]) -> Figures:
    """Run a command on one core with its logs on stderr, and return the JSON object of its last line."""
    print("running", *command[1:4], file=sys.stderr)
    pin = _one_core if hasattr(os, "sched_setaffinity") else None
    with tempfile.TemporaryDirectory() as nothing_calibrated:
        environment = os.environ | ONE_THREAD | {"FLAGCORE_HOME": nothing_calibrated}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, preexec_fn=pin)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _chip() -> str:
    from flagcore import api

    known = {chip for plugin in api.plugin_table() for chip in plugin["chips"]}
    return next((chip for chip in CHIPS if chip in known), "cpu")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _peak_mib() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
