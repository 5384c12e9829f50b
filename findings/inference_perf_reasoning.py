"""inference-perf measures a reasoning model from its first token after the reasoning, and leaves the reasoning out.

Topic: Metrics
Package: inference-perf 0.7.0
Expected: A time to the first token of 0.1 s and 10 tokens, as the server sends and counts them.
Seen: Only the text in `content` counts. The time to the first token is that of the first token of the answer, 0.9 s,
  and the output has 2 tokens. The count of the server, 10, is read and kept apart.
Hurts: Who compares servers with and without a reasoning parser, or clients: evalscope and guidellm count the
  reasoning.
Date: 2026-11-28
Output:
    inference-perf 0.7.0
    sent: 8 tokens of reasoning from 0.1 s, 2 tokens of the answer from 0.9 s
    measured: first token after 0.9 s, 2 tokens; the server counts 10
"""

import os
import subprocess
import sys
import tempfile
import textwrap

# It runs on Python 3.11 too.
PACKAGES = ["--only-binary=:all:", "--ignore-requires-python", "inference-perf==0.7.0", "aiohttp==3.14.5"]


def look() -> None:
    """Print what the client measures of a server that sends a token each 0.1 s."""
    import asyncio
    import json
    import time
    from importlib.metadata import version

    import aiohttp
    from aiohttp import web
    from inference_perf.apis.chat import ChatCompletionAPIData, ChatMessage
    from inference_perf.config import APIConfig

    class Tokenizer:
        """A token is a word."""

        def count_tokens(self, text: str, add_special_tokens: bool = True) -> int:
            return len(text.split())

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 10}}
        for delta in [{"reasoning_content": "think "}] * 8 + [{"content": "answer "}] * 2:
            await asyncio.sleep(0.1)
            await response.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def measure() -> None:
        server = web.Application()
        server.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        request = ChatCompletionAPIData(messages=[ChatMessage(role="user", content="a b c d")])
        async with aiohttp.ClientSession() as session:
            start = time.perf_counter()
            async with session.post(url, json={}) as response:
                found = (
                    await request.process_response(response, APIConfig(streaming=True), Tokenizer())
                ).response_metrics
        first = found.chunk_times[0] - start
        assert first > 0.8
        assert found.output_tokens == 2
        print("inference-perf", version("inference-perf"))
        print("sent: 8 tokens of reasoning from 0.1 s, 2 tokens of the answer from 0.9 s")
        print(
            f"measured: first token after {int(first * 10) / 10} s, {found.output_tokens} tokens; "
            f"the server counts {found.server_usage['completion_tokens']}"
        )
        await runner.cleanup()

    asyncio.run(measure())


def main() -> None:
    """Install the packages in a temporary folder, look, and compare with the output in the docstring."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        seen = subprocess.run(
            [python, __file__, "look"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": folder},
        ).stdout
    print(seen, end="")
    assert seen == textwrap.dedent(__doc__.split("Output:\n")[1]), "the output changed"


if __name__ == "__main__":
    look() if sys.argv[1:] else main()
