"""Speculation: a draft proposes tokens, and one iteration of the model computes all of them and accepts the first ones.

Each drafted token takes a pass through the draft: the model's layer for multi-token prediction, the layer of an EAGLE
head, or all layers of another model (vllm 0.33 `v1/spec_decode/llm_base_proposer.py`; sglang 0.5.23
`srt/speculative/eagle_worker_v2.py`). Prompts also pass it once. The small product that joins its inputs is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from flagcore_models.formats import HEAD, MTP
from flagcore_models.layers import attention_of, dense_of, depth_of

from flagcore.domain.model import Layer
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_serving.job import SCHEMES, Load, Rates
from flagcore_serving.model.work import AdaptedRequests, Serving
from flagcore_serving.space.settings import Settings

USUAL = {"mtp": 0.7, "eagle": 0.6, "eagle3": 0.65, "draft_model": 0.6}
"""The acceptance that is assumed if it is unknown. MTP of DeepSeek-V3: a mean length of 2.18 with 2 drafts and 2.44
with 3, which are 0.70 and 0.66 (lmsys.org, 2025-07-17), and 0.85 to 0.9 for one draft (arXiv 2412.19437, section
5.4.3). EAGLE-3: 0.58 with gpt-oss-120b in a server, 0.75 in arXiv 2503.01840; a small model: 0.5 to 0.75 (arXiv
2211.17192, table 3). How often n-grams and suffixes repeat depends on the traffic, so they have none."""
SPREAD = 0.2
"""The acceptance may be lower or higher than in USUAL by this much, as the sources of USUAL differ."""
NO_GAIN_FACTOR = 2.0
"""Factor on both ends of an interval if the acceptance is unknown and no gain is predicted. A choice."""
HEAD_VOCABULARY = 32_000
"""Tokens of the own output head of EAGLE-3 (arXiv 2503.01840, `draft_vocab_size` of its checkpoints)."""


class Draft(NamedTuple):
    """A draft: the rows of the candidates that use it, its sizes, and the share of its tables that are its own."""

    rows: BoolArray
    serving: Serving
    own_tables: float


def drafts(serving: Serving, settings: Settings) -> Iterator[Draft]:
    """Yield the drafts of candidates. A head has one layer without experts, in 16 bits. Multi-token prediction has the
    format of the model, unless its checkpoint leaves it in 16 bits. The sizes of another model are
    those of `serving.draft`; it is left out if they are unknown."""
    model, serving = serving.model, serving._replace(adapters=AdaptedRequests())
    of_head = {part: own for part, own in serving.parts.items() if part == HEAD}
    wide = serving._replace(precision=serving.wide_precision, weight_bytes=None, parts=of_head)
    head, own_layer = (
        replace(model, num_layers=1, moe_first_dense_layers=0, layers=(layer,))
        for layer in (Layer(mixer=attention_of(model), network=dense_of(model)), depth_of(model).layer)
    )
    of_scheme = {
        "mtp": ((wide if MTP in serving.wide else serving)._replace(model=own_layer), 0.0),
        "eagle": (wide._replace(model=head), 0.0),
        "eagle3": (wide._replace(model=replace(head, vocab_size=min(HEAD_VOCABULARY, model.vocab_size))), 0.5),
    }
    if serving.draft is not None:
        of_scheme["draft_model"] = wide._replace(model=serving.draft), 1.0
    for scheme, (draft, own_tables) in of_scheme.items():
        rows = (settings.scheme == 1 + SCHEMES.index(scheme)) & (settings.drafted > 0)
        if rows.any():
            yield Draft(rows, draft, own_tables)


def rates(load: Load, scheme: int) -> Rates | None:
    """Return the acceptance of the drafts of a scheme, as in `Settings`: the known one, else the usual one, else
    None."""
    name = SCHEMES[scheme - 1] if scheme else ""
    usual = USUAL.get(name)
    return load.accepted(name) or (None if usual is None else (usual,))


def tokens_per_iteration(rates: Rates, drafted: float) -> float:
    """Return the expected number of tokens that a sequence gets in one iteration with speculation: one of the model
    itself, and each of the `drafted` tokens with its rate (Leviathan et al. 2023, arXiv 2211.17192, equation 1)."""
    tokens, rate, ratio = 1.0, 1.0, 1.0
    for place in range(int(drafted)):
        after = rates[place] if place < len(rates) else rate * ratio
        ratio, rate = after / rate if rate else 0.0, after
        tokens += rate
    return tokens


def gains(load: Load, settings: Settings, rows: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the tokens that each row drafts, 0 if their acceptance is unknown, and its `tokens_per_iteration`."""
    drafts, found = list(zip(settings.scheme[rows].tolist(), settings.drafted[rows].tolist(), strict=True)), {}
    for scheme, drafted in set(drafts):
        accepted = rates(load, scheme)
        number = 0.0 if accepted is None else float(drafted)
        found[scheme, drafted] = number, tokens_per_iteration(accepted or (), number)
    table = np.array([found[each] for each in drafts]).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def uncertainty(loads: Sequence[Load], settings: Settings) -> FloatArray:
    """Return the factor on both ends of a candidate's interval, because the acceptance of its drafts is not known."""
    factors = np.ones(settings.scheme.shape)
    for row in np.flatnonzero(settings.drafted > 0).tolist():
        scheme = SCHEMES[settings.scheme[row] - 1] if settings.scheme[row] else ""
        if all(load.accepted(scheme) for load in loads):
            continue
        factors[row] = NO_GAIN_FACTOR
        if (usual := USUAL.get(scheme)) is not None:
            low, middle, high = (
                tokens_per_iteration((each,), float(settings.drafted[row]))
                for each in (usual - SPREAD, usual, usual + SPREAD)
            )
            factors[row] = max(middle / low, high / middle)
    return factors
