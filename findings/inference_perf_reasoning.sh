#!/bin/sh
# inference-perf measures a reasoning model from its first token after the reasoning, and leaves the reasoning out.
#
# Topic: Metrics
# Package: inference-perf 0.7.0
# Expected: A time to the first token that was sent, and 10 tokens, as the server sends and counts them.
# Seen: Only the text in `content` counts. The time to the first token is that of the first token of the answer, which
#   is the ninth, and the output has 2 tokens. The count of the server, 10, is read and kept apart.
# Hurts: Who compares servers with and without a reasoning parser, or clients: evalscope and guidellm count the
#   reasoning.
# Date: 2026-11-29
# Output:
#     inference-perf 0.7.0
#     sent: 8 tokens of reasoning, 2 tokens of the answer
#     measured: the first token is number 9, 2 tokens; the server counts 10
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    --only-binary=:all: --ignore-requires-python inference-perf==0.7.0 aiohttp==3.14.5
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what the client measures of a server that sends a token each 0.2 s."""
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

    sent: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 10}}
        for delta in [{"reasoning_content": "think "}] * 8 + [{"content": "answer "}] * 2:
            await asyncio.sleep(0.2)
            sent.append(time.perf_counter())
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
            async with session.post(url, json={}) as response:
                found = (
                    await request.process_response(response, APIConfig(streaming=True), Tokenizer())
                ).response_metrics
        first = sum(each <= found.chunk_times[0] for each in sent)
        assert first == 9
        assert found.output_tokens == 2
        print("inference-perf", version("inference-perf"))
        print("sent: 8 tokens of reasoning, 2 tokens of the answer")
        print(
            f"measured: the first token is number {first}, {found.output_tokens} tokens; "
            f"the server counts {found.server_usage['completion_tokens']}"
        )
        await runner.cleanup()

    asyncio.run(measure())


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
