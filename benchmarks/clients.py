"""Compares flagcore's load client with other clients on one running server that has nothing else to do.

    python benchmarks/clients.py URL TOKENIZER [--vllm PROGRAM] [--aiperf PROGRAM] [--guidellm PROGRAM] [--rounds 3]

All clients send the same closed loop: prompts and answers of fixed lengths. flagcore runs before and after each other
client, and is compared by the mean of both runs, so that a slow drift of the machine cancels out. The output has the
median ratio of the other client's figures to flagcore's, the ratios of all rounds, and the ratio of flagcore's own
second run to its first: its distance from 1 is the noise of one round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.reports import read_report
from flagcore.engines.serving.load.result import Target
from flagcore.engines.serving.load.sending import measure

COMMANDS = {
    "vllm": (
        "bench serve --backend openai --base-url {url} --endpoint /v1/completions --model {model}"
        " --tokenizer {tokenizer} --dataset-name random --random-input-len {input} --random-output-len {output}"
        " --num-prompts {requests} --max-concurrency {concurrency} --ignore-eos --temperature 0 --seed {seed}"
        " --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99"
        " --save-result --result-filename {report}"
    ),
    "aiperf": (
        "profile --url {url} --model {model} --tokenizer {tokenizer} --endpoint-type completions --streaming"
        " --isl {input} --isl-stddev 0 --osl {output} --osl-stddev 0 --request-count {requests}"
        " --num-dataset-entries {requests} --concurrency {concurrency} --random-seed {seed} --use-server-token-count"
        " --extra-inputs ignore_eos:true --extra-inputs temperature:0 --extra-inputs min_tokens:{output}"
        " --ui none --artifact-dir {folder}"
    ),
    "guidellm": (
        "run --backend kind=openai_http,target={url},model={model},request_format=/v1/completions"
        " --profile kind=concurrent,streams={concurrency} --constraint kind=max_requests,count={requests}"
        " --data kind=synthetic_text,prompt_tokens={input},output_tokens={output}"
        " --tokenizer kind=hf_auto,model={tokenizer} --seed kind=static,value={seed}"
        " --output kind=json,path={report} --disable-console"
    ),
}
REPORTS = {"aiperf": "profile_export_aiperf.json", "vllm": "report.json", "guidellm": "benchmarks.json"}
FIGURES = ("requests_per_s", "output_tokens_per_s", "ttft_s.mean", "ttft_s.p50", "tpot_s.mean", "tpot_s.p50")
FURTHER = ("itl_s.mean", "itl_s.p50", "e2e_s.mean", "e2e_s.p50")


def main() -> None:
    """Print the ratios of each client as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("tokenizer", type=Path)
    for name in COMMANDS:
        parser.add_argument(f"--{name}", type=Path)
    for name, value in (("input", 128), ("output", 64), ("requests", 80), ("concurrency", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    own_figures(options, model, seed=0)  # warms the server up
    result = {}
    for name in COMMANDS:
        if getattr(options, name):
            result[name] = compared(options, name, model)
            print(json.dumps({name: result[name]["median"]}), file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))


def compared(options: argparse.Namespace, name: str, model: str) -> dict[str, object]:
    """Return the ratios of a client's figures to flagcore's, and of flagcore's second run to its first."""
    rounds, own = list[dict[str, float]](), list[dict[str, float]]()
    for number in range(options.rounds):
        seed = 1 + 3 * number
        first = own_figures(options, model, seed)
        other = other_figures(options, name, model, seed + 1)
        last = own_figures(options, model, seed + 2)
        names = [each for each in (*FIGURES, *FURTHER) if each in other]
        rounds.append({each: other[each] / statistics.mean((first[each], last[each])) for each in names})
        own.append({each: last[each] / first[each] for each in names})
    return {"median": medians(rounds), "rounds": rounds, "own": medians(own)}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}


def own_figures(options: argparse.Namespace, model: str, seed: int) -> Mapping[str, float]:
    load = Load(
        input_len=options.input,
        output_len=options.output,
        num_prompts=options.requests,
        concurrency=options.concurrency,
    )
    vocab = len(json.loads((options.tokenizer / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    result = measure([Target(options.url)], load, model=model, vocab_size=vocab, seed=seed, timeout_s=600)
    if result.problems:
        raise SystemExit("; ".join(result.problems))
    return result.figures


def other_figures(options: argparse.Namespace, name: str, model: str, seed: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, REPORTS[name])
        values = {**vars(options), "model": model, "seed": seed, "report": report, "folder": folder}
        program = getattr(options, name)
        argv = [program, *(word.format(**values) for word in shlex.split(COMMANDS[name]))]
        with Path(folder, "log").open("wb") as log:
            code = subprocess.run(argv, stdout=log, stderr=log, check=False).returncode
        if code or not report.exists():
            raise SystemExit(f"{name}: {Path(folder, 'log').read_text('utf-8', 'replace')[-3000:]}")
        return read_report(report)


if __name__ == "__main__":
    main()
