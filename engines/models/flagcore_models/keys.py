"""The keys of a Hugging Face config.json as `families.yaml` names them: defaults, aliases and computed sizes."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.model import Model
from flagcore.spec.plain_data import SafeLoader


class Table(Mapping[str, Any]):
    """A large mapping in YAML. Of an entry that is asked for, only its text and what its aliases refer to are read.

    `load`: the reader of YAML. To read the public models takes longer than all else that a plan reads.
    """

    def __init__(self, text: str, load: Callable[[str], Any]) -> None:
        _comments, *parts = re.split(r"(?m)^(?!#)(\S+):", text)
        self._texts, self._load = dict(zip(parts[::2], parts[1::2], strict=True)), load
        self._found = dict[str, Any]()
        self._anchors = {anchor: name for name, part in self._texts.items() for anchor in re.findall(r"&(\w+)", part)}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            needed = [name]
            for each in needed:
                aliases = re.findall(r"\*(\w+)", self._texts[each])
                needed += (self._anchors[alias] for alias in aliases if alias in self._anchors)
            text = "".join(f"{each}:{self._texts[each]}" for each in dict.fromkeys(reversed(needed)))
            self._found[name] = self._load(text)[name]
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


_load = partial(yaml.load, Loader=SafeLoader)
_FAMILIES, *_TABLES = files(__package__).joinpath("families.yaml").read_text("utf-8").split("\n---\n")
FAMILIES = Table(_FAMILIES, _load)
MODELS, NAMES, _ALIASES, KINDS, MIXERS = map(_load, _TABLES)
"""FAMILIES: defaults of the keys of config.json, by model_type. MODELS: defaults of the keys of vision_config, by the
model_type of multimodal models whose vision tower `Vision` can describe. NAMES: the key of config.json that messages
name for a field of `Model`. KINDS: what names of layers mean. MIXERS: the keys of the fields of mixers."""
ALIASES: Mapping[str, str] = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
"""Alternative keys of config.json, and the fields of `Config` that they mean."""
WIDTH = "intermediate_size"
LISTED = (
    *("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "num_experts"),
    "first_k_dense_replace",
)
"""The keys that may give a size for each layer, of which the mean is read, or for text and for images."""
OF_EXPERTS = "moe_intermediate_size", "num_experts_per_tok"
"""The sizes of experts that may differ by block."""
ELEMENTS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The bytes of an element of states, by its type."""
COMMON = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "layer_types", "per_layer_config"),
    *("quantization_config", "final_logit_softcapping"),
)
"""The keys that all model families have. The first five are required."""


def given_keys(keys: Mapping[str, Any], places: str | list[str]) -> list[tuple[str, Any]]:
    """Return those of the keys `places` that are given and not `auto`, with their values."""
    found = [(key, value_at(keys, key)) for key in ([places] if isinstance(places, str) else places)]
    return [(key, value) for key, value in found if value not in (None, "auto")]


def value_at(keys: Mapping[str, Any], name: str) -> object:
    """Return the value of a key, or of a key in a section: `section.key`. None if there is none."""
    section, _, inner = name.partition(".")
    return value_at(section_of(keys, section), inner) if inner else keys.get(name)


def keys_of_family(config: Mapping[str, Any], family: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys that a family has, with its defaults, or all keys if it is not known (None).

    `renamed` of a family has keys, also in sections, with the keys of others that they mean.
    """
    defaults = {**(family or {})}
    fixed, renamed, _ = (defaults.pop(key, {}) for key in ("always", "renamed", "kinds"))
    renamed = {key: name for key, name in renamed.items() if name in renamed or config.get(name) is None}
    names = {key: ALIASES.get(key, key) for key in config if key not in renamed}
    others = {name: value for key, name in renamed.items() if (value := value_at(config, key)) is not None}
    given, layers = {*names.values(), *others}, config.get("num_hidden_layers")
    found = {
        key: _one(names.get(key, key), value, layers)
        for key, value in {**_kept(config, names, None if family is None else {*COMMON, *defaults}), **others}.items()
    }
    if found.get(WIDTH) != (widths := config.get(WIDTH)) and isinstance(widths, list) and len(widths) == layers:
        found[f"{WIDTH}s"] = widths
    read = {**{name: value for name, value in defaults.items() if name not in given}, **found, **fixed}
    listed = next((found[key] for key in found if ALIASES.get(key, key) == "layer_types" and found[key]), None)
    if "num_hidden_layers" not in given and isinstance(listed, (str, list)):
        read["num_hidden_layers"] = len(listed)
    return {**_derived(read), **{name: value for name, value in read.items() if value is not None}, **_computed(read)}


def _kept(config: Mapping[str, Any], names: Mapping[str, str], known: Collection[str] | None) -> dict[str, Any]:
    """Return the keys in `names` that are known, or all, without null in place of another key of the same name."""
    several = Counter(name for key, name in names.items() if config[key] is not None)
    kept = [key for key, name in names.items() if config[key] is not None or not several[name]]
    return {key: config[key] for key in kept if known is None or names[key] in known}


def _one(name: str, value: Any, layers: object) -> Any:
    """Return the mean of sizes that are given for each of the `layers`, or the size for text."""
    if (
        name not in LISTED
        or not isinstance(value, list)
        or not all(isinstance(each, int) for each in value[:1] or [""])
    ):
        return value
    return round(sum(value) / len(value)) if len(value) == layers else value[0]


def _derived(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes that follow from other keys: of Mamba, its bytes of an element, and the width of a head."""
    sizes = (keys.get(name) for name in ("hidden_size", "num_attention_heads"))
    hidden, heads = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
    expand, own, parts = (keys.get(name) for name in ("mamba_expand", "mamba_d_ssm", "mamba_n_heads"))
    width = own if isinstance(own, int) else (expand if isinstance(expand, int) else 2) * hidden
    head = width // parts if isinstance(parts, int) and parts > 0 else None
    found = {"_width": width, "_head": head, "_rank": -(-hidden // 16), "_share": hidden // heads}
    found["_element"] = ELEMENTS.get(str(keys.get("mamba_ssm_dtype") or keys.get("mamba_ssm_cache_dtype")))
    if "moe_intermediate_size" in keys:  # no layer is dense
        found["intermediate_size"] = keys["moe_intermediate_size"]
    return found


def _computed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes that replace those of keys: of the blocks of Nemotron-NAS, the feed-forward width of LFM2, or the
    layers of both stacks of HRM-Text.

    Sources: `modeling_decilm.py` of Llama-3.3-Nemotron-Super-49B, transformers 5.24
    `models/lfm2` and `models/hrm_text`. Of experts with other sizes in each layer (Nemotron-H Puzzle), tokens choose
    the mean number by width.
    """
    stack = keys.get("layers_of_stack") or keys.get("num_hidden_layers")
    if "layers_of_stack" in keys and isinstance(stack, int):
        return {"num_hidden_layers": 2 * stack}
    blocks, width, hidden = (keys.get(name) for name in ("block_configs", "intermediate_size", "hidden_size"))
    if keys.get("block_auto_adjust_ff_dim") and isinstance(width, int):
        width = int(2 * width / 3 * (keys.get("block_ffn_dim_multiplier") or 1))
        return {"intermediate_size": _rounded(width, keys.get("block_multiple_of") or 256)}
    if not isinstance(blocks, list) or not isinstance(hidden, int):
        return {}
    experts = [[section_of({"": each}, "").get(name) for name in OF_EXPERTS] for each in blocks]
    sizes = [(width, chosen) for width, chosen in experts if isinstance(width, int) and isinstance(chosen, int)]
    if total := sum(width for width, _chosen in sizes):
        means = total / len(sizes), sum(width * chosen for width, chosen in sizes) / total
        return dict(zip(OF_EXPERTS, map(round, means), strict=True))
    return _of_blocks(blocks, hidden, keys)


def _of_blocks(blocks: Sequence[Any], hidden: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    names, widths, groups = list[str](), list[int](), list[int]()
    for block in blocks:
        attention, network = (section_of(block, name) for name in ("attention", "ffn"))
        has_attention, has_network = (
            not (part.get("no_op") or part.get("replace_with_linear")) for part in (attention, network)
        )
        if has_attention or has_network:
            names.append(" ".join(["attention"] * has_attention + ["mlp"] * has_network))
        if has_attention:
            groups.append(attention.get("n_heads_in_group") or 1)
        if has_attention or has_network:
            width = _rounded(int(2 * network.get("ffn_mult", 4) * hidden / 3), 256)
            widths.append((network.get("intermediate_size") or width) * has_network)
    found: dict[str, Any] = {"layer_types": names, "num_hidden_layers": len(names)}
    if own := [width for width in widths if width]:
        found |= {WIDTH: round(sum(own) / len(own)), f"{WIDTH}s": widths}
    if groups and isinstance(heads := keys.get("num_attention_heads"), int):
        found["num_key_value_heads"] = heads // min(groups)
    return found


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def unread_keys(config: Mapping[str, Any], read: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the keys of a config.json that are not in `read`, nor false, 0 or empty."""
    inner = ("text_config", "quantization_config", "model_type", "expert_dtype")
    read = {key.partition(".")[0] for key in read}
    for start, section in (("", config), *((f"{key}.", section_of(config, key)) for key in inner)):
        for key, value in section.items():
            if value and not {key, ALIASES.get(key)} & {*inner, *read}:
                yield start + key, str(value)


def section_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping `key` of a config.json, or an empty dict if it is missing or not a mapping."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


_STRETCHED = ("linear", "dynamic")
"""Types of rope scaling whose factor must be applied to `max_position_embeddings`. Other types already include it."""


def context_of(config: Mapping[str, Any], *, scales_yarn: bool = True) -> int | None:
    """Return the context length of the model in a config.json, in tokens, or None if it is unknown.

    Some files with yarn state the unscaled length, and files of Gemma 3 the scaled length. `scales_yarn`: whether the
    factor of yarn is applied; transformers 5 assumes that all files state the scaled length.
    """
    config = section_of(config, "text_config") or config
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        return None
    rope = section_of(config, "rope_scaling") or section_of(config, "rope_parameters")
    of_kinds = [each for each in rope.values() if isinstance(each, Mapping)]  # each kind of layer has its own scaling
    factor = next((each["factor"] for each in (rope, *of_kinds) if each.get("factor")), None)
    if not isinstance(factor, (int, float)) or factor <= 1 or str(config.get("model_type")).startswith("gemma3"):
        return length
    if of_kinds:
        return None
    kind, original = rope.get("rope_type", rope.get("type")), length
    if kind == "yarn" and isinstance(rope.get("original_max_position_embeddings"), int):
        original = rope["original_max_position_embeddings"]
    kinds = (*_STRETCHED, "yarn") if scales_yarn else _STRETCHED
    return max(length, int(original * factor)) if kind in kinds else length


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face config.json has weights in mxfp4 of transformers."""
    return section_of(config, "quantization_config").get("quant_method") == "mxfp4"


def has_fp8_cache(model: Model, methods: tuple[str, ...]) -> bool:
    """Return whether the config.json of a model quantized by one of the `methods` says that the KV cache has FP8."""
    stated, start = dict(model.unread), "quantization_config."
    cache = [stated.get(start + key, "") for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    is_fp8 = "FP8" in cache or bool(re.search(r"'num_bits': 8\b", cache[0]) and "'type': 'float'" in cache[0])
    return is_fp8 and stated.get(f"{start}quant_method", "").startswith(methods)
