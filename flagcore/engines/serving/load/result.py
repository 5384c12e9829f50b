"""The result of a load: complete answers, or problems without metrics; and estimates when it ends early."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

FEWEST_ANSWERS = 8
"""Fewest requests of a load that ends early. With several in flight, it is at least as many as these: every one of them
has then ended once, so that neither fast nor slow answers are missing. Chosen: a mean of eight varies a third as much
as a single request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a load that did not end in its time: `answered` of the `requests` that it needs in `seconds`.

    `each_s` is the mean time of an answer, `all_s` the estimated time of all requests; None if unknown. `has_tokens`
    is whether any token arrived.
    """

    answered: int
    requests: int
    seconds: float
    each_s: float | None
    all_s: float | None
    has_tokens: bool


COMPLETIONS, GENERATE = "/v1/completions", "/generate"
"""APIs that accept token ids: OpenAI's completions, and SGLang's API, also of engines whose completions need text."""
CHAT = "/v1/chat/completions"
"""OpenAI's API that accepts text and images."""


class ProblemKind(Enum):
    """The kind of a failed request. The text of a problem is `kind: message`."""

    NOT_REACHED = "not reached"
    CONNECTION_LOST = "connection lost"
    STATUS = "refused"
    ERROR = "error in the stream"
    BROKEN = "broken stream"
    NO_USAGE = "no usage"
    WRONG_LENGTH = "wrong length"
    TIMED_OUT = "timed out"


class RequestFailed(Exception):
    """A request failed. It is not raised outside this package."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind.value}: {' '.join(message.split())[:MAX_MESSAGE]}")


MAX_MESSAGE = 400
"""Maximum number of characters of a problem's message."""


@dataclass(frozen=True, slots=True)
class Target:
    """One instance. `url` is the root of the server, such as `http://127.0.0.1:8000`, `path` its API for token ids.

    Instances that only prefill or only decode exchange caches at `transfer_port`.
    """

    url: str
    path: str = COMPLETIONS
    transfer_port: int = 0

    @property
    def address(self) -> str:
        """The URL of the API."""
        return self.url.rstrip("/") + self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The complete answer to one request. Times are seconds; `start_s` is relative to the load's first send.

    `ttft_s` is the time from send to the first piece of text, `e2e_s` to the last piece. `tpot_s` is the time between
    both per token after the first, None for one token or one piece. `gaps_s` are the times between pieces. Token counts
    are those of the request and those reported by the server. `target` is the index of the instance in the load's
    targets.
    """

    start_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    gaps_s: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    target: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.e2e_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of one load. If there are problems, `figures` is empty; `completed` and `failed` are counts of
    requests.

    The names of `figures` are those of `flagcore.domain.serving`. `duration_s` is the time from the first send to the
    last finish. Of a steady state, `requests` are those that count; they were sent in `window`, in seconds after the
    first send. `notes` tell the user which values are estimated and whether the client may be the bottleneck. A load
    that was `stopped` because it was certain to exceed a limit has no figures, and the `requests` so far. `error` is
    the relative uncertainty of the means of a load that ended before they were precise. `progress` is that of a load
    that did not end in its time; it has figures if enough requests were answered.
    """

    figures: Mapping[str, float]
    duration_s: float
    completed: int
    failed: int
    problems: tuple[str, ...] = ()
    requests: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = field(default=())
    stopped: bool = False
    window: tuple[float, float] | None = None
    error: float = 0.0
    progress: Progress | None = None
