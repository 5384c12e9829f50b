"""The result of a load: complete answers with metrics, or the problems. Also its progress if it ended early."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

FEWEST_ANSWERS = 8
"""Minimum number of answers of a load that ends early. If more requests are in flight, their number is the minimum:
each of them has then ended once, so that neither fast nor slow answers are missing. A choice: a mean of eight varies a
third as much as a single request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a load that did not end within its time.

    - `answered`, `requests`: the number of answered requests, and the number of requests that the load needs.
    - `seconds`: the time that the load took.
    - `each_s`: the mean time of an answer; None if unknown.
    - `all_s`: the estimated time of all requests; None if unknown.
    - `has_tokens`: whether any token arrived.
    """

    answered: int
    requests: int
    seconds: float
    each_s: float | None
    all_s: float | None
    has_tokens: bool


COMPLETIONS, GENERATE = "/v1/completions", "/generate"
"""APIs that accept token ids: OpenAI's completions, and SGLang's API, which some engines have whose completions accept
only text."""
CHAT = "/v1/chat/completions"
"""OpenAI's API that accepts text and images."""


class ProblemKind(Enum):
    """Why a request failed. The text of a problem is `kind: message`."""

    NOT_REACHED = "not reached"
    CONNECTION_LOST = "connection lost"
    STATUS = "refused"
    ERROR = "error in the stream"
    BROKEN = "broken stream"
    NO_USAGE = "no usage"
    WRONG_LENGTH = "wrong length"
    TIMED_OUT = "timed out"


class RequestFailed(Exception):
    """A request failed. The exception does not leave this package."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind.value}: {' '.join(message.split())[:MAX_MESSAGE]}")


MAX_MESSAGE = 400
"""Maximum number of characters of a problem's message."""


class Target(NamedTuple):
    """One instance to which requests are sent.

    - `url`: the root of the server, such as `http://127.0.0.1:8000`.
    - `path`: the API to use.
    - `transfer_port`: the port at which instances that only prefill or only decode exchange caches.
    """

    url: str
    path: str = COMPLETIONS
    transfer_port: int = 0

    @property
    def address(self) -> str:
        """The full URL of the API."""
        return self.url.rstrip("/") + self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The complete answer to one request. Times are in seconds.

    - `start_s`: when the request was sent, after the load's first send.
    - `ttft_s`, `e2e_s`: the times from the send to the first and to the last piece of text.
    - `tpot_s`: the time between both pieces per token after the first one; None for one token or one piece.
    - `gaps_s`: the times between pieces.
    - `input_tokens`: tokens of the prompt, from the request or, for a text, as the server counted them.
    - `output_tokens`: tokens of the answer. The number always equals the requested one.
    - `target`: the index of the instance in the load's targets.
    - `task`, `turn`: the number of its conversation (None without any), and of the request in this conversation.
    """

    start_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    gaps_s: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    target: int = 0
    task: int | None = None
    turn: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.e2e_s


@dataclass(frozen=True, slots=True)
class MinRate:
    """A rate of a closed loop, below which the load is too slow: tokens or requests per second.

    `name`: output_tokens_per_s, total_tokens_per_s or requests_per_s.
    """

    name: str
    minimum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of one load.

    - `figures`: the metrics, with the names of `flagcore.domain.metrics`. Empty if there are problems.
    - `duration_s`: seconds from the first send to the last answer's end.
    - `completed`, `failed`: numbers of requests.
    - `problems`: why requests failed, one line each.
    - `requests`: the answers. In a steady state they are only those that count.
    - `notes`: notes to the user about estimated values, and about a client that may be the bottleneck.
    - `stopped`: whether the load was stopped because it was certain to exceed a limit. A stopped load has no figures,
      and `requests` are the answers so far.
    - `slow`: whether the load was stopped because it was very likely too slow. It has the figures of its answers.
    - `window`: the time in which the requests that count were sent, in seconds after the first send; None if all count.
    - `error`: the relative uncertainty of the means, if the load ended before they were precise or is a closed loop.
    - `progress`: the progress of a load that did not end in its time; None for others. Such a load has figures if
      enough requests were answered.
    """

    figures: Mapping[str, float]
    duration_s: float
    completed: int
    failed: int
    problems: tuple[str, ...] = ()
    requests: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = field(default=())
    stopped: bool = False
    slow: bool = False
    window: tuple[float, float] | None = None
    error: float = 0.0
    progress: Progress | None = None
