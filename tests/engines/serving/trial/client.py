"""A third-party client: sends one request, and writes a report like `vllm bench serve --save-result`.

client.py URL REPORT [lacks | fails]
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

url, report, behaviour = (*sys.argv[1:3], *sys.argv[3:], "")[:3]
if behaviour == "fails":
    sys.exit("the client cannot do this")
body = {
    "model": "m",
    "prompt": [300] * 16,
    "max_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
}
request = urllib.request.Request(
    f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request) as answer:
    assert b"[DONE]" in answer.read()
figures = {"duration": 2.0, "completed": 1, "failed": 0, "request_throughput": 0.5, "total_token_throughput": 12.0}
if behaviour != "lacks":
    figures |= {"output_throughput": 4.0, "mean_ttft_ms": 20.0, "p99_ttft_ms": 30.0}
Path(report).write_text(json.dumps(figures | {"total_input_tokens": 16, "total_output_tokens": 8}))
