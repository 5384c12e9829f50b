"""Compares flagcore's load client with other clients on one running server that has nothing else to do.

    python benchmarks/clients.py URL TOKENIZER [--vllm PROGRAM] [--aiperf PROGRAM] [--guidellm PROGRAM] [--rounds 3]

All clients send the same closed loop: prompts and answers of fixed lengths. flagcore runs before and after each other
client, and is compared by the mean of both runs, so that a slow drift of the machine cancels out. The output has the
median ratio of the other client's figures to flagcore's, the ratios of all rounds, and the ratio of flagcore's own
second run to its first: its distance from 1 is the noise of one round.

With `--text`, flagcore and `vllm bench serve` send the prompts of a JSONL file (`prompt`). The counters of the server
before and after each run give the acceptance of drafted tokens and the share of prompt tokens in the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.reports import read_report
from flagcore.engines.serving.load.result import Target
from flagcore.engines.serving.load.sending import measure
from flagcore.engines.serving.load.traffic import salted

COMMANDS = {
    "vllm": (
        "bench serve --backend openai --base-url {url} --endpoint /v1/completions --model {model}"
        " --tokenizer {tokenizer} {prompts}"
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
RANDOM = "--dataset-name random --random-input-len {input} --random-output-len {output}"
TEXT = "--dataset-name custom --dataset-path {folder}/prompts.jsonl --custom-output-len {output} --skip-chat-template"
REPORTS = {"aiperf": "profile_export_aiperf.json", "vllm": "report.json", "guidellm": "benchmarks.json"}
FIGURES = ("requests_per_s", "output_tokens_per_s", "ttft_s.mean", "ttft_s.p50", "tpot_s.mean", "tpot_s.p50")
FURTHER = ("total_tokens_per_s", "itl_s.mean", "itl_s.p50", "e2e_s.mean", "e2e_s.p50")
SHARES = {
    "acceptance_rate": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "cache_hit_rate": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}
"""Counters of the server, as a part and the whole."""


def main() -> None:
    """Print the ratios of each client as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("tokenizer", type=Path)
    for name in COMMANDS:
        parser.add_argument(f"--{name}", type=Path)
    for name, value in (("input", 128), ("output", 64), ("requests", 80), ("concurrency", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    if options.text:
        options.texts = [json.loads(line)["prompt"] for line in options.text.read_text("utf-8").splitlines()]
        options.requests = len(options.texts)
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
    rounds, own, values = list[dict[str, float]](), list[dict[str, float]](), list[dict[str, list[float]]]()
    for number in range(options.rounds):
        seed = 1 + 3 * number
        first = own_figures(options, model, seed)
        other = other_figures(options, name, model, seed + 1)
        last = own_figures(options, model, seed + 2)
        names = [each for each in (*FIGURES, *FURTHER, *SHARES) if each in other]
        values.append({each: [first[each], other[each], last[each]] for each in names})
        rounds.append({each: other[each] / statistics.mean((first[each], last[each])) for each in names})
        own.append({each: last[each] / first[each] for each in names})
    return {"median": medians(rounds), "rounds": rounds, "own": medians(own), "values": values}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}


def own_figures(options: argparse.Namespace, model: str, seed: int) -> Mapping[str, float]:
    load = Load(
        input_len=options.input,
        output_len=options.output,
        num_prompts=options.requests,
        concurrency=options.concurrency,
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.text:
            load = replace(load, trace=str(write_prompts(options, folder, seed)))
        vocab = len(json.loads((options.tokenizer / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
        before = counters(options.url)
        result = measure([Target(options.url)], load, model=model, vocab_size=vocab, seed=seed, timeout_s=600)
        if result.problems:
            raise SystemExit("; ".join(result.problems))
        return {**result.figures, **shares(before, counters(options.url))}


def other_figures(options: argparse.Namespace, name: str, model: str, seed: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, REPORTS[name])
        values = {**vars(options), "model": model, "seed": seed, "report": report, "folder": folder}
        if options.text:
            write_prompts(options, folder, seed)
        values["prompts"] = (TEXT if options.text else RANDOM).format(**values)
        argv = [getattr(options, name), *shlex.split(COMMANDS[name].format(**values))]
        before = counters(options.url)
        with Path(folder, "log").open("wb") as log:
            code = subprocess.run(argv, stdout=log, stderr=log, check=False).returncode
        if code or not report.exists():
            raise SystemExit(f"{name}: {Path(folder, 'log').read_text('utf-8', 'replace')[-3000:]}")
        return {**read_report(report), **shares(before, counters(options.url))}


def write_prompts(options: argparse.Namespace, folder: str, seed: int) -> Path:
    """Write the texts of one run, which no prefix cache has, and return the file."""
    file = Path(folder, "prompts.jsonl")
    rows = ({"prompt": text, "max_tokens": options.output} for text in salted(options.texts, (seed,)))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def counters(url: str) -> dict[str, float]:
    """Return the sums of the server's counters by name."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    rows = [re.match(r"([^#{ ]+)(?:{.*})? (\S+)$", line) for line in lines]
    totals: Counter[str] = Counter()
    for row in rows:
        if row:
            totals[row[1]] += float(row[2])
    return dict(totals)


def shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    increases = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {
        name: increases[part] / increases[whole]
        for name, (part, whole) in SHARES.items()
        if increases.get(whole) and increases.get(part)
    }


if __name__ == "__main__":
    main()
