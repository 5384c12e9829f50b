"""The result of a load: complete answers, or problems and no figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

COMPLETIONS, GENERATE = "/v1/completions", "/generate"
"""APIs that take token ids: OpenAI's, and that of engines whose completions take text only."""


class ProblemKind(Enum):
    """Why an answer does not count. A problem reads `kind: what happened`."""

    NOT_REACHED = "not reached"
    CONNECTION_LOST = "connection lost"
    STATUS = "refused"
    ERROR = "error in the stream"
    BROKEN = "broken stream"
    NO_USAGE = "no usage"
    WRONG_LENGTH = "wrong length"
    TIMED_OUT = "timed out"


class RequestFailed(Exception):
    """One request was not answered. Not raised outside this package."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind.value}: {' '.join(message.split())[:MESSAGE]}")


MESSAGE = 400
"""Characters of a problem's message."""


@dataclass(frozen=True, slots=True)
class Target:
    """One instance. `url` is the server's root: `http://127.0.0.1:8000`, `path` its API for prompts of token ids."""

    url: str
    path: str = COMPLETIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request that was answered in full. Times are seconds, `start_s` since the load's first send.

    `ttft_s` is send to first piece of text, `e2e_s` send to last piece, `tpot_s` the time between the two per token
    after the first, None for one token or an answer in one piece; `gaps_s` lie between pieces. Tokens are what was sent
    and what the server counted, never pieces. `target` is the place of the instance in the load's targets.
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
    """One load. With a problem there are no figures; `completed` and `failed` count requests.

    `figures` are named as in `flagcore.domain.serving`. `duration_s` is first send to last finish. `notes` are for the
    reader: what was estimated, and whether the client may have been the limit. A load that was `stopped` because it was
    certain to exceed a limit has no figures.
    """

    figures: Mapping[str, float]
    duration_s: float
    completed: int
    failed: int
    problems: tuple[str, ...] = ()
    requests: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = field(default=())
    stopped: bool = False
