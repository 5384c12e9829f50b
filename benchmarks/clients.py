"""Compares flagcore's load client with other clients, on a reference server whose log is the truth, or on a real one.

    python benchmarks/clients.py TOKENIZER [--vllm PROGRAM] [--aiperf PROGRAM] [--guidellm PROGRAM] [--rounds 5]

TOKENIZER is a folder with `tokenizer.json`. The clients take turns, and send each of the loads of `LOADS` once per
round. The output has two tables per load, with the median and the range over the rounds: the figures of each client
relative to those of the server's log, by flagcore's definitions, and those of the other clients relative to flagcore's.
The range of 5 rounds is a 94% confidence interval of the median. All values of a run are written to standard error.

`--capacity` compares the clients at rising rates of chunks instead. `--url` is a running server, to which only the load
`closed` of `--input`, `--output`, `--requests` and `--concurrency` is sent. With `--text`, the prompts are those of a
JSONL file (`prompt`), for flagcore and `vllm bench serve`; the counters of the server before and after each run give
the acceptance of drafted tokens and the share of prompt tokens in the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from client_reports import read_report
from flagcore_serving.job import Load
from flagcore_serving.load.figures import figures_of
from flagcore_serving.load.result import Answer, Target
from flagcore_serving.load.sending import measure
from flagcore_serving.load.traffic import salted

from flagcore.domain.metrics import LATENCIES, STATISTICS

Figures = Mapping[str, float]

COMMANDS = {
    "vllm": (
        "bench serve --backend openai --base-url {url} --endpoint /v1/completions --model {model}"
        " --tokenizer {tokenizer} {prompts} {arrivals}"
        " --num-prompts {requests} --ignore-eos --temperature 0 --seed {seed}"
        " --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99"
        " --save-result --result-filename {report}"
    ),
    "aiperf": (
        "profile --url {url} --model {model} --tokenizer {tokenizer} --endpoint-type completions --streaming"
        " --isl {input} --isl-stddev {input_deviation} --osl {output} --osl-stddev {output_deviation} {arrivals}"
        " --request-count {requests} --num-dataset-entries {requests} --random-seed {seed} --use-server-token-count"
        " --extra-inputs ignore_eos:true --extra-inputs temperature:0 --ui none --artifact-dir {folder}"
    ),
    "guidellm": (
        "run --backend kind=openai_http,target={url},model={model},request_format=/v1/completions"
        " --profile {arrivals} --constraint kind=max_requests,count={requests}"
        " --data kind=synthetic_text,prompt_tokens={input},output_tokens={output}{lengths}"
        " --tokenizer kind=hf_auto,model={tokenizer} --seed kind=static,value={seed}"
        " --output kind=json,path={report} --disable-console"
    ),
}
ARRIVALS = {
    "vllm": ("--max-concurrency {concurrency}", "--request-rate {rate} --burstiness {burstiness}"),
    "aiperf": ("--concurrency {concurrency}", "--request-rate {rate} --arrival-pattern {pattern}"),
    "guidellm": ("kind=concurrent,streams={concurrency}", "kind={pattern},rate={rate}"),
}
"""Options of closed and open loops."""
LENGTHS = ",prompt_tokens_stdev={input_deviation},output_tokens_stdev={output_deviation}"
RANDOM = "--dataset-name random --random-input-len {input} --random-output-len {output} --random-range-ratio {spread}"
TEXT = "--dataset-name custom --dataset-path {folder}/prompts.jsonl --custom-output-len {output} --skip-chat-template"
REPORTS = {"aiperf": "profile_export_aiperf.json", "vllm": "report.json", "guidellm": "benchmarks.json"}

SCHEDULE = ("--start-ms=50", "--prompt-ms=0.25", "--chunk-ms=8")
CONSTANT = 1e6
"""A `burstiness` with constant gaps."""
BASE = Load(input_len=128, output_len=64, num_prompts=80, concurrency=8, range_spread=0.0)
OPEN = replace(BASE, concurrency=None, request_rate=12.0)
LOADS: dict[str, tuple[Load, tuple[str, ...]]] = {
    "closed": (BASE, ()),
    "spread": (replace(BASE, range_spread=0.5), ()),
    "poisson": (OPEN, ()),
    "constant": (replace(OPEN, burstiness=CONSTANT), ()),
    "queue": (BASE, ("--slots=4",)),
    "four_tokens": (BASE, ("--tokens-per-chunk=4",)),
    "empty_first": (BASE, ("--empty-first",)),
}
"""Loads and the options of the reference server besides `SCHEDULE`."""
CAPACITY_CONNECTIONS = 64
CAPACITY_RATES = (4000, 16000, 32000, 48000)
"""Chunks per second over all connections."""
FIGURES = (
    "requests_per_s",
    "output_tokens_per_s",
    *(f"{latency}.{statistic}" for latency in LATENCIES for statistic in STATISTICS),
)
SHARES = {
    "acceptance_rate": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "cache_hit_rate": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}
"""Counters of a real server, as a part and the whole."""


@dataclass(frozen=True)
class Server:
    """A server to which all clients send. `counts` are the counters of a real one."""

    url: str
    model: str
    is_reference: bool

    @classmethod
    def at(cls, url: str, *, is_reference: bool) -> Server:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            return cls(url, json.load(answer)["data"][0]["id"], is_reference)

    def log(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/log") as answer:
            rows: list[dict[str, Any]] = json.load(answer)
        return rows

    def counters(self) -> dict[str, float]:
        """Return the sums of the counters by name; none of a reference server."""
        if self.is_reference:
            return {}
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        totals: Counter[str] = Counter()
        for line in lines:
            if row := re.match(r"([^#{ ]+)(?:{.*})? (\S+)$", line):
                totals[row[1]] += float(row[2])
        return dict(totals)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    for name in COMMANDS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--url")
    for name, value in (("input", 128), ("output", 64), ("requests", 80), ("concurrency", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    options.texts = []
    if options.text:
        options.texts = [json.loads(line)["prompt"] for line in options.text.read_text("utf-8").splitlines()]
        options.requests = len(options.texts)
    if options.url:
        load = replace(BASE, input_len=options.input, output_len=options.output, num_prompts=options.requests)
        load = replace(load, concurrency=options.concurrency)
        server = Server.at(options.url, is_reference=False)
        run_client(options, server, "flagcore", load, seed=0)  # warms the server up
        compare(options, server, "closed", load)
    elif options.capacity:
        for rate in CAPACITY_RATES:
            interval_s = CAPACITY_CONNECTIONS / rate
            tokens = round(4.0 / interval_s)  # an answer takes 4 s
            load = Load(input_len=16, output_len=tokens, num_prompts=128, concurrency=CAPACITY_CONNECTIONS)
            schedule = (f"--start-ms={1e3 * interval_s}", f"--chunk-ms={1e3 * interval_s}")
            with reference(options, *schedule) as server:
                compare(options, server, f"{rate} chunks/s", replace(load, range_spread=0.0))
    else:
        for name in options.loads:
            load, arguments = LOADS[name]
            with reference(options, *SCHEDULE, *arguments) as server:
                compare(options, server, name, load)


@contextlib.contextmanager
def reference(options: argparse.Namespace, *arguments: str) -> Iterator[Server]:
    """Run a reference server."""
    program = [sys.executable, str(Path(__file__).with_name("reference_server.py"))]
    tokenizer = f"--tokenizer={options.tokenizer / 'tokenizer.json'}"
    process = subprocess.Popen([*program, tokenizer, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server.at(f"http://127.0.0.1:{int(process.stdout.readline())}", is_reference=True)
    finally:
        process.terminate()
        process.wait()


def compare(options: argparse.Namespace, server: Server, title: str, load: Load) -> None:
    """Run all clients in turn, and print their figures relative to the log and to flagcore's."""
    names = ["flagcore", *(name for name in COMMANDS if getattr(options, name))]
    values: dict[str, list[Figures]] = {name: [] for name in names}
    errors: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(options.rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        for place, name in enumerate(order):
            figures = run_client(options, server, name, load, seed=1 + number * len(names) + place)
            values[name].append(figures)
            row = {"load": title, "client": name, "figures": figures}
            if server.is_reference:
                truth = true_figures(server.log(), load.num_prompts or 0)
                errors[name].append(ratios(figures, truth))
                row["log"] = truth
            print(json.dumps(row), file=sys.stderr, flush=True)
    if server.is_reference:
        print_table(f"{title}: client / server's log", errors)
    own = values.pop("flagcore")
    to_own = {name: [ratios(*pair) for pair in zip(values[name], own, strict=True)] for name in values}
    if to_own:
        print_table(f"{title}: client / flagcore", to_own)


def ratios(figures: Figures, reference: Figures) -> dict[str, float]:
    return {
        name: figures[name] / reference[name] for name in (*FIGURES, *SHARES) if name in figures and reference.get(name)
    }


def print_table(title: str, columns: Mapping[str, list[dict[str, float]]]) -> None:
    """Print the median and the range of each figure and client as Markdown."""
    print(f"\n| {title} | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for figure in (*FIGURES, *SHARES):
        cells = []
        for rounds in columns.values():
            series = [each[figure] for each in rounds if figure in each]
            cell = f"{statistics.median(series):.3f} ({min(series):.3f} to {max(series):.3f})" if series else ""
            cells.append(cell)
        if any(cells):
            print(f"| `{figure}` | {' | '.join(cells)} |")
    sys.stdout.flush()


def true_figures(rows: list[dict[str, Any]], requests: int) -> dict[str, float]:
    """Return the figures of the last `requests` requests in a log; a client may send others before them."""
    rows = sorted(rows, key=lambda row: float(row["received_s"]))[-requests:]
    if len(rows) < requests:
        raise SystemExit(f"the server answered {len(rows)} requests instead of {requests}")
    answers = []
    for row in rows:
        received, sent, tokens = row["received_s"], row["sent_s"], row["output_tokens"]
        answers.append(
            Answer(
                start_s=received,
                ttft_s=sent[0] - received,
                tpot_s=(sent[-1] - sent[0]) / (tokens - 1) if tokens > 1 else None,
                e2e_s=sent[-1] - received,
                gaps_s=tuple(after - before for before, after in pairwise(sent)),
                input_tokens=row["input_tokens"],
                output_tokens=tokens,
            )
        )
    return figures_of(answers)


def run_client(options: argparse.Namespace, server: Server, name: str, load: Load, seed: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        if options.texts:
            load = replace(load, trace=str(write_prompts(options, folder, seed)))
        before = server.counters()
        run = own_figures if name == "flagcore" else other_figures
        figures = run(options, server, name, load, folder, seed)
        return {**figures, **shares(before, server.counters())}


def own_figures(options: argparse.Namespace, server: Server, name: str, load: Load, folder: str, seed: int) -> Figures:
    vocab = len(json.loads((options.tokenizer / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    load = replace(load, seed=seed)
    result = measure([Target(server.url)], load, model=server.model, vocab_size=vocab, seed=seed, timeout_s=600)
    if result.problems:
        raise SystemExit("; ".join(result.problems))
    for note in result.notes:
        print(note, file=sys.stderr)
    return result.figures


def other_figures(
    options: argparse.Namespace, server: Server, name: str, load: Load, folder: str, seed: int
) -> Figures:
    report = Path(folder, REPORTS[name])
    spread = load.range_spread or 0.0
    values: dict[str, Any] = {
        "url": server.url,
        "model": server.model,
        "tokenizer": options.tokenizer,
        "input": load.input_len,
        "output": load.output_len,
        "requests": load.num_prompts,
        "concurrency": load.concurrency,
        "rate": load.request_rate,
        "burstiness": load.burstiness,
        "pattern": "constant" if load.burstiness == CONSTANT else "poisson",
        "spread": spread,
        "input_deviation": round(load.input_len * spread / 3**0.5),  # that of uniformly distributed lengths
        "output_deviation": round(load.output_len * spread / 3**0.5),
        "seed": seed,
        "report": report,
        "folder": folder,
    }
    values["lengths"] = LENGTHS.format(**values) if spread else ""
    values["prompts"] = (TEXT if options.texts else RANDOM).format(**values)
    values["arrivals"] = ARRIVALS[name][load.concurrency is None].format(**values)
    argv = [str(getattr(options, name)), *shlex.split(COMMANDS[name].format(**values))]
    with Path(folder, "log").open("wb") as log:
        code = subprocess.run(argv, stdout=log, stderr=log, check=False).returncode
    if code or not report.exists():
        raise SystemExit(f"{name}: {Path(folder, 'log').read_text('utf-8', 'replace')[-3000:]}")
    return read_report(report)


def write_prompts(options: argparse.Namespace, folder: str, seed: int) -> Path:
    """Write the texts of one run, which no prefix cache has, and return the file."""
    file = Path(folder, "prompts.jsonl")
    rows = ({"prompt": text, "max_tokens": options.output} for text in salted(options.texts, (seed,)))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def shares(before: Figures, after: Figures) -> dict[str, float]:
    increases = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {
        name: increases[part] / increases[whole]
        for name, (part, whole) in SHARES.items()
        if increases.get(whole) and increases.get(part)
    }


if __name__ == "__main__":
    main()
