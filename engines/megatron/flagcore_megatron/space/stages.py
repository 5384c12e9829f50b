"""Layouts of pipeline stages: Megatron's layout texts, and the layouts of published runs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from flagcore_models.layers import depth_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_training.splits import StageLayers

from flagcore.domain.knob import in_versions
from flagcore.domain.model import Layer, Model
from flagcore.domain.spec import SettingValue
from flagcore.errors import SpecError

LAYOUT, PATTERN = "pipeline_model_parallel_layout", "hybrid_layer_pattern"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
VIRTUAL_STAGES = "virtual_pipeline_model_parallel_size"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
SPLIT_SETTINGS = (LAYOUT, EMBEDDING, LOSS, FIRST, LAST)
"""Settings that determine the split of the layers."""

_MAX_LAYERS = 200_000
_GROUP, _ONE = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
_FIX = "write e.g. Et*4|(t*4|)*14tL: E, then every t, then L, with a | between stages"


@lru_cache(maxsize=1024)
def parse_layout(text: str, num_layers: int, mtp_num_layers: int) -> tuple[StageLayers, ...]:
    """Return the contents of each (virtual) stage in model order. Raises SpecError for an invalid text.

    The grammar and the rules are those of megatron-core 0.16 (`pipeline_parallel_layer_layout.py`): E embedding, t
    layer, m multi-token prediction, L loss; `|` ends a stage, `x*n` repeats a letter and `(...)*n` a part.
    """
    letters = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _ONE):
        if sum(len(match[1]) * int(match[2][:9]) for match in pattern.finditer(letters)) > _MAX_LAYERS:
            raise _wrong(text, "is too long")
        letters = pattern.sub(lambda match: match[1] * int(match[2]), letters)
    plain = letters.replace("|", "")
    if wrong := sorted(set(plain) - set("EtmL")):
        raise _wrong(text, f"has {wrong[0]!r}, which is none of E, t, m, L and |")
    if not plain.startswith("E") or not plain.endswith("L") or plain.count("E") != 1 or plain.count("L") != 1:
        raise _wrong(text, "must begin with the only E and end with the only L")
    for letter, wanted, name in (("t", num_layers, "num_layers"), ("m", mtp_num_layers, "mtp_num_layers")):
        if plain.count(letter) != wanted:
            raise _wrong(text, f"has {plain.count(letter)} x {letter}, but {name} is {wanted}")
    stages = letters.split("|")
    if "t" in plain.partition("m")[2] or sum("m" in stage for stage in stages) > 1:
        raise _wrong(text, "must have all m after the last t, on one stage")
    return tuple(
        StageLayers(embedding=s.count("E"), layers=s.count("t"), mtp=s.count("m"), loss=s.count("L")) for s in stages
    )


LETTERS = {"Mamba-2": "M", "Gated DeltaNet": "G", "dense": "-", "experts": "E"}
"""Letters of hybrid patterns for the labels of mixers, and for feed-forward networks. Those of attention: `_letter`."""


SYMBOLS = {"*-M": "", "E": ">=0.16", "/G|": ">=0.17", "D": ">=0.18", "+": ">=0.19"}
"""The symbols of hybrid patterns, by the releases that read them. Source: the tags core_v0.12.0 to core_v0.19.0, and
0.20 (@d98e8a64), `mamba_hybrid_layer_allocation.py` or `hybrid_layer_allocation.py`."""


def check_symbols(text: str, key: str, release: str | None = None) -> str:
    """Return a hybrid pattern. Raises SpecError if a release, or any if it is unknown, does not read it."""
    known = "".join(each for each, versions in SYMBOLS.items() if in_versions(versions, release))
    if wrong := sorted({*text} - {*known}):
        problem = f"has {wrong[0]!r}, which megatron-core{f' {release}' if release else ''} does not read"
        fix = f"use the symbols {' '.join(known)}"
        if wrong[0] in "".join(SYMBOLS):
            fix += ", or set train.engine_version to the release that reads it"
        raise SpecError(key=key, value=text, problem=problem, fix=fix)
    if len({*text.split("/")[1:]}) > 1:
        raise SpecError(key=key, value=text, problem="has different depths", fix="repeat the same letters after each /")
    return text


def pattern_stages(text: str, model: Model, release: str | None = None) -> tuple[StageLayers, ...]:
    """Return the contents of each (virtual) stage of a hybrid pattern in model order; empty if it has no bars.

    Raises SpecError for a pattern with another number of layers than the model. Multi-token prediction is on the last
    stage. Source of the grammar: megatron-core 0.20 @d98e8a64 `hybrid_layer_allocation.py`.
    """
    stages = check_symbols(text, f"train.settings.{PATTERN}", release).partition("/")[0].split("|")
    if (letters := sum(map(len, stages))) != model.num_layers:
        problem, fix = f"has {letters} layers, but the model has {model.num_layers}", "give the pattern of this model"
        raise SpecError(key=f"train.settings.{PATTERN}", value=text, problem=problem, fix=fix)
    return stages_with([len(stage) for stage in stages], model.mtp_num_layers) if len(stages) > 1 else ()


def stages_with(layers: Sequence[int], depths: int) -> tuple[StageLayers, ...]:
    """Return the contents of stages with these numbers of layers. Multi-token prediction is on the last one."""
    end = len(layers) - 1
    return tuple(
        StageLayers(embedding=int(place == 0), layers=each, mtp=depths * (place == end), loss=int(place == end))
        for place, each in enumerate(layers)
    )


def pattern_text(model: Model, chunks: Sequence[int], given: str = "") -> str:
    """Return the hybrid pattern of a model whose (virtual) stages have these numbers of layers, in model order.

    Its letters are those of the pattern `given`, by default those of the model's layers, without which it is empty.
    """
    layers, *depths = given.split("/")
    letters = layers.replace("|", "") or "".join(map(_letter, model.layers))
    if not given and model.mtp_num_layers:
        layer = depth_of(model).layer
        depths = [_letter(layer) + _letter(replace(layer, mixer=None))] * model.mtp_num_layers
    ends = [0, *accumulate(chunks)]
    stages = "|".join(letters[start:end] for start, end in pairwise(ends))
    return "/".join([stages, *depths]) if len(letters) == model.num_layers else ""


def _letter(layer: Layer) -> str:
    """Return the letter of a layer, by its mixer or its network; empty if there is none."""
    mixer, network = layer.mixer, layer.network
    if isinstance(mixer, Attention):
        return "D" if mixer.indexer else "+" if isinstance(mixer, LatentAttention) else "*"
    return LETTERS.get(mixer.label if mixer else network.kind if network else "", "")


def layout_text(chunks: Sequence[int], mtp_num_layers: int, *, early: bool = False) -> str:
    """Return the layout text of (virtual) stages with these numbers of layers in model order, in its short form.

    With `early`, multi-token prediction is on the stage before the loss.
    """
    stages = ["t" * count if count < 3 else f"t*{count}" for count in chunks]
    stages[-1 - early] += "m" * mtp_num_layers
    middle = [
        f"{stage}|" * number if number < 3 or not stage else f"({stage}|)*{number}"
        for stage, number in ((stage, len(list(equal))) for stage, equal in groupby(stages[1:-1]))
    ]
    return f"E{stages[0]}|{''.join(middle)}{stages[-1]}L"


def may_start_empty(model: Model) -> bool:
    """Return whether the first of several virtual stages may have only the embedding: with equal layers and no MTP."""
    return not model.mtp_num_layers and (not model.experts or not model.moe_first_dense_layers)


def chunk_layers(layers: Sequence[int], leading: Sequence[int], virtual: int, *, early: bool = False) -> list[int]:
    """Return the number of layers of each virtual stage, in model order, from the number of layers of each device.

    `leading` are the numbers of dense layers that come first in the model. Each virtual stage of a device has as many
    layers as the next one, or one more. The virtual stages of the last device have as many layers as in an even split,
    except the very last one, which also has the loss: it has the remaining layers. With `early`, it has no layers, and
    multi-token prediction is on the stage before it.
    """
    largest, last = -(-sum(layers) // (len(layers) * virtual)), len(layers) - 1
    dense = max((device for device, count in enumerate(leading) if count), default=0)
    if _wraps_around(layers, leading, virtual, early=early):
        return _wrapped(layers, leading, virtual, early=early)
    chunks = []
    for device, (count, first) in enumerate(zip(layers, leading, strict=True)):
        empty = int(early and device == last)
        parts = virtual - empty
        if device == last and not early:
            sizes = _filled(count, virtual, max(largest, first))
        elif parts > 1 and (device < dense or first > -(-count // parts)):
            sizes = [first, *_spread(count - first, parts - 1)]
        else:
            sizes = _spread(count, parts)
            sizes = sizes if device or first or all(sizes) else sizes[::-1]  # the one with the embedding is empty
        chunks.append([*sizes, *[0] * empty])
    return [sizes[place] for place in range(virtual) for sizes in chunks]


def _wraps_around(layers: Sequence[int], leading: Sequence[int], virtual: int, *, early: bool) -> bool:
    """Return whether a device has leading layers on several virtual stages, because it has too few other layers. Every
    virtual stage has a layer, except the very last one and, with early multi-token prediction, the one before it."""
    if virtual == 1 or not all(leading):
        return False
    least = [virtual - 1] * (len(layers) - 1 - early) + [virtual - 2] * (1 + early)
    return any(count - first < few for count, first, few in zip(layers, leading, least, strict=True))


def _wrapped(layers: Sequence[int], leading: Sequence[int], virtual: int, *, early: bool) -> list[int]:
    """Return the number of layers of each virtual stage if leading layers are on as many of them as possible."""
    unplaced, order = [*leading], 0
    while order < len(layers) * (virtual - 1) + (not early) and unplaced[order % len(layers)]:
        unplaced[order % len(layers)] -= 1
        order += 1
    chunks = []
    for device, (count, first) in enumerate(zip(layers, leading, strict=True)):
        number = -(-(order - device) // len(layers))
        sizes = _spread(first, number)
        is_last = device == len(layers) - 1
        remaining, parts = count - first, virtual - number - (early and is_last)
        if not parts:
            sizes[-1] += remaining
        elif is_last and not early:
            sizes += _filled(remaining, parts, -(-sum(layers) // (len(layers) * virtual)))
        else:
            sizes += _spread(remaining, parts)
        chunks.append([*sizes, *[0] * (virtual - len(sizes))])
    return [sizes[place] for place in range(virtual) for sizes in chunks]


def _spread(count: int, parts: int) -> list[int]:
    return [count // parts + (place < count % parts) for place in range(parts)]


def _filled(count: int, parts: int, largest: int) -> list[int]:
    """Divide `count` into `parts` numbers from 1 to `largest`. The last number is the remainder."""
    sizes: list[int] = []
    for later in reversed(range(parts - 1)):
        sizes.append(min(largest, count - sum(sizes) - later))
    return [*sizes, count - sum(sizes)]


def published_split(model: Model, stages: int) -> dict[str, SettingValue]:
    """Return the settings with which a published run assigned its layers to `stages` (virtual) stages.

    Three options of Megatron-LM are tried, and the first one that is possible is returned: an even split; embedding and
    loss count as one layer each; only the loss counts as a layer. If none is possible, every stage has the same number
    of layers, rounded up; the excess is taken from the last stage, then from the first. Published recipes use these
    options: Llama 405B and Qwen3-235B use the second, DeepSeek-V3 the last. The result is empty, which Megatron
    refuses, if there are fewer layers than stages between the first and the last.
    """
    layers = model.num_layers
    if layers % stages == 0:
        return {}
    if (layers + 2) % stages == 0:
        return {EMBEDDING: True, LOSS: True}
    if (layers + 1) % stages == 0:
        return {LOSS: True}
    if layers < stages - 2:
        return {}
    text = "|".join("t" * number for number in even_split(layers, stages))
    return {LAYOUT: f"E{text}{'m' * model.mtp_num_layers}L"}


def even_split(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: equal numbers, rounded up.

    The excess over `layers` is taken from the last stage, then from the first.
    """
    largest = -(-layers // stages)
    missing = largest * stages - layers
    if missing > 2 * largest:
        extra = layers % stages
        return [layers // stages + (0 < stage <= extra) for stage in range(stages)]
    last = min(missing, largest)
    return [largest - (missing - last), *[largest] * (stages - 2), largest - last]


def _wrong(text: str, problem: str) -> SpecError:
    return SpecError(key=f"train.settings.{LAYOUT}", value=text, problem=problem, fix=_FIX)
