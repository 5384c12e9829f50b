"""Asks servers for greedy tokens and their log-probabilities, and compares those of two trials.

The prompts are those of the load or, with a trace that has texts, of its file. A trial sends them at once, and some of
them alone: the difference between both is the engine's own noise between batch sizes, at least LEAST_NOISE.
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagcore.domain.files import read_regular
from flagcore.domain.knob import ANSWERS
from flagcore.domain.spec import Task
from flagcore.domain.trial import Answers
from flagcore.errors import FlagError
from flagcore.i18n import N_
from flagcore_serving.job import Load
from flagcore_serving.load.result import COMPLETIONS, RequestFailed, Target
from flagcore_serving.load.traffic import prompts, traffic

FILE = "answers.json"
PROMPTS, ALONE, TOKENS, CHOICES = 64, 8, 8, 5
"""The numbers of prompts that are sent at once, and alone; of tokens of an answer; and of likely tokens at each."""
SHARE, ALONE_SHARE = 0.1, 0.3
"""The share of a trial's time, with its start, that the answers may take; and the share of this for prompts alone."""
LEAST, LEAST_TOGETHER = 2, 4
"""The least number of prompts at once, whatever their time; and if the load sends as many. One is always sent alone."""
LEAST_NOISE, MOST_NOISES = 4e-3, 5.0
"""The least noise of a log-probability, and the largest mean difference that counts as noise, in noises.

llama.cpp (xllamacpp 2026.10) on a CPU, 8 tokens of a Qwen3 of 50 million random parameters: other slots, threads and
micro-batches 0, flash attention off 0.008, a cache in q8_0 0.011, in q4_0 0.094, rotary positions divided by four 0.19.
"""
CHANGED = 5.0
"""If answers may change, log-probabilities may differ by this factor times `control.answers` in the mean. The default
is between the caches in q8_0 and in q4_0."""
SAME, *_, CHANGES = ANSWERS

Answer = list[tuple[str, float, dict[str, float]]]
"""For each token of an answer: the token, its log-probability, and those of the likely tokens at its place."""


def ask(
    targets: Sequence[Target], model: str, load: Load, vocab_size: int, seconds: float, left_s: float
) -> dict[str, Any]:
    """Return the answers of servers to the first prompts, sent alone and at once, and the `seconds` that they took.

    `seconds`: the time for as many prompts as possible; the least number of them may take `left_s`. If servers do not
    state log-probabilities in time, the result is the `problem`.
    """
    import asyncio  # its import is slow, and plans do not need it

    urls = [each.url for each in targets if each.path == COMPLETIONS]
    if not urls:
        return {"problem": "the servers have no completions of token ids"}
    requests, seed = traffic(replace(load, num_prompts=PROMPTS, turns=1, adapters=0, warmup=0)), (load.seed, 0)
    if requests.images:
        return {"problem": "prompts with images are not sent"}
    sent: Sequence[Any] = requests.texts or [
        each.tolist() for each in prompts(requests, prefix_len=load.prefix_len, vocab_size=vocab_size, seed=seed)
    ]
    tokens = min(TOKENS, int(requests.output_len.min()))
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "logprobs": CHOICES, "ignore_eos": True}
    bodies = [json.dumps({**body, "prompt": each}).encode() for each in sent[:PROMPTS]]
    asked, began = _Asked(urls, bodies, load.concurrency or len(bodies)), time.monotonic()
    try:
        asyncio.run(asyncio.wait_for(asked.ask(seconds), left_s))
    except asyncio.TimeoutError:
        if not asked.at_once:
            return {"problem": f"its servers answered too few prompts in {left_s:.0f} s; set a higher time limit"}
    except (RequestFailed, *INVALID) as error:
        return {"problem": f"{type(error).__name__}: {error}"[:200]}
    return {"at_once": asked.at_once, "alone": asked.alone, "seconds": time.monotonic() - began}


INVALID = (LookupError, TypeError, ValueError, AttributeError)


@dataclass
class _Asked:
    """Answers to the first prompts. `bodies`: a request for each prompt. `width`: how many a load sends at once."""

    urls: Sequence[str]
    bodies: Sequence[bytes]
    width: int
    alone: list[Answer] = field(default_factory=list)
    at_once: list[Answer] = field(default_factory=list)

    async def ask(self, seconds: float) -> None:
        """Ask in about `seconds`, but the least numbers in any time. Raises RequestFailed, or INVALID for others.

        The time of prompts at once is that of as many alone until a group of them was measured.
        """
        import asyncio

        from flagcore_serving.load.client import post, session  # importing aiohttp is slow, and plans do not need it

        async def send(place: int) -> Answer:
            url = self.urls[place % len(self.urls)] + COMPLETIONS
            return read_answer(await post(http, url, self.bodies[place]))

        clock = asyncio.get_running_loop().time
        began = clock()
        async with session() as http:
            alone_s, each_s, least = seconds * ALONE_SHARE, 0.0, max(LEAST, min(LEAST_TOGETHER, self.width))
            while len(self.alone) < min(ALONE, len(self.bodies)) and each_s * (len(self.alone) + 1) <= alone_s:
                self.alone.append(await send(len(self.alone)))
                each_s = (clock() - began) / len(self.alone)
            while left := range(len(self.at_once), len(self.bodies)):
                fits = max(int((seconds - clock() + began) / each_s), least - len(self.at_once))
                if fits < 1:
                    break
                sent_at, places = clock(), left[: min(fits, self.width)]
                self.at_once += await asyncio.gather(*map(send, places))
                each_s = (clock() - sent_at) / len(places)


def read_answer(text: bytes) -> Answer:
    """Read the log-probabilities of OpenAI's completions, or of llama.cpp's, which have the form of its chats."""
    found = json.loads(text)["choices"][0]["logprobs"]
    if "content" in found:
        return [
            (each["token"], each["logprob"], {one["token"]: one["logprob"] for one in each["top_logprobs"]})
            for each in found["content"]
        ]
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))


def compared(task: Task, change: str, folder: str, baseline: str) -> Answers | None:
    """Return the mean divergence of the answers in two folders. None if there are none.

    `change`: as in `Engine.answers`. Raises FlagError if knobs change answers, and servers do not state any.
    """
    if change == SAME:
        return None
    (own, problem), (base, other) = _load(folder), _load(baseline)
    difference, equal, count = divergence(own.get("at_once", ()), base.get("at_once", ()))
    if not count:
        if change != CHANGES:
            return None
        raise FlagError(f"its knobs change answers, and there are none to compare: {problem or other or 'too late'}")
    noise = max(divergence(base["at_once"], base["alone"])[0], LEAST_NOISE)
    limit = MOST_NOISES * noise
    if change == CHANGES:
        limit = max(limit, CHANGED * (task.spec.control.answers or 0.0))
    text = f"log-probabilities of tokens differ by {difference:.2g} (limit {limit:.2g}), after {equal:.1f} equal tokens"
    return Answers(difference=difference / noise, limit=limit / noise, unit=N_("of the engine's own noise"), text=text)


def _load(folder: str) -> tuple[dict[str, Any], str]:
    with suppress(OSError, ValueError):
        data = json.loads(read_regular(Path(folder, FILE)))
        return data, str(data.get("problem", ""))
    return {}, "the trial had no time to ask for any"


def divergence(own: Sequence[Answer], base: Sequence[Answer]) -> tuple[float, float, int]:
    """Return the mean difference of log-probabilities up to the first other token, and the mean number of tokens before
    it, and the number of compared answers.

    The other token counts with the difference to the log-probability that the base has for it.
    """
    differences, equal = list[float](), list[int]()
    for mine, theirs in zip(own, base, strict=False):
        same = 0
        for (token, value, _), (base_token, base_value, likely) in zip(mine, theirs, strict=False):
            other = likely.get(token, min(likely.values(), default=base_value))
            differences.append(abs(value - base_value) if token == base_token else abs(base_value - other))
            if token != base_token:
                break
            same += 1
        equal.append(same)
    if not differences:
        return 0.0, 0.0, 0
    return statistics.fmean(differences), statistics.fmean(equal), len(equal)
