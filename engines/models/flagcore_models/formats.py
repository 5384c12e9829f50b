"""Number formats of quantized weights: which format each module of a checkpoint has.

Every tool has rules of its own, such as groups with targets, modules in 16 bits, or a format for each module.
`rules_of` reads all of them as one ordered list of patterns, with which `shares` counts the formats of a model's parts.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flagcore.domain.model import Model, Part, Product
from flagcore.errors import SpecError
from flagcore.spec.plain_data import package_yaml, read_mapping
from flagcore_models.keys import section_of
from flagcore_models.layers import own_layers

_TABLES = package_yaml(__package__, "formats.yaml")
CONFIG, _SIDE = "config.json", "hf_quant_config.json"
IGNORED = (
    *("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules", "skip_modules"),
)
"""Keys of a quantization_config with the modules that it leaves out."""
HEAD, MTP, HEAD_MODULE = "head", "multi-token prediction", "lm_head"
_USUAL = 128
"""The usual group of weights of 4 bits that share a scale (AutoAWQ and GPTQModel's default)."""


class Stored(NamedTuple):
    """A number format of weights, such as `int4` or `nvfp4`.

    - `group`: the weights that share a scale, if the format does not determine it; 0: a channel or tensor.
    - `scale`: the bytes of the scale, and of the zero point, of a group.
    - `only`: whether weights in a format that chips compute with are converted first.
    """

    format: str
    group: int = 0
    scale: float = 2.0
    only: bool = False

    @property
    def bytes(self) -> float:
        """Bytes per weight, with its share of scales."""
        if self.format in (known := _TABLES["bytes"]) and self.group in (0, _USUAL) and self.scale == 2.0:
            return float(known[self.format])
        bits = int(re.sub(r"\D", "", self.format) or 16)
        return bits / 8.0 + (self.scale / self.group if self.group and self.format.startswith("int") else 0.0)


class Rules(NamedTuple):
    """The formats of modules: of the first of the patterns that matches, else `base`. None means 16 bits.

    A pattern is a regular expression for the beginning of a name, after `re:`, a pattern with wildcards, or consecutive
    parts of a name. `head`: whether `base` applies to the output head, too.
    """

    base: Stored | None
    patterns: tuple[tuple[str, Stored | None], ...] = ()
    head: bool = False


def config_of(path: Path, *, file: str = CONFIG, key: str = "") -> dict[str, Any]:
    """Return the contents of a config.json, given its path or its directory. Raises SpecError with `file` and `key`.

    ModelOpt 0.29 and older write the formats to a file beside. vLLM 0.32 (`transformers_utils/config.py`) and SGLang
    0.5.23 (`_parse_quant_hf_config`) read that file only if config.json has none.
    """
    path = path / CONFIG if path.is_dir() else path
    config, side = read_mapping(path, file=file, key=key), path.with_name(_SIDE)
    if section_of(config, "quantization_config") or not (path.name == CONFIG and side.is_file()):
        return config
    with suppress(SpecError):
        if found := section_of(read_mapping(side, file=_SIDE), "quantization"):
            config["quantization_config"] = {"quant_method": "modelopt", **found}
    return config


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json, perhaps that of its text model, or `quantization` of MLX."""
    text = section_of(config, "text_config")
    places = [(each, key) for key in ("quantization_config", "compression_config") for each in (config, text)]
    return next(filter(None, (section_of(*place) for place in (*places, (config, "quantization")))), {})


def format_of_weights(config: Mapping[str, Any]) -> str | None:
    """Return the number format of quantized weights, or None if they are not quantized or the format is unknown.

    Of several formats it is the one with the fewest bits. Weights of 4 bits that are converted before computing,
    including mxfp4 of transformers (17/32 bytes), are reported as int4.
    """
    return _narrowest(rules_of(quantization_of(config)))


def _narrowest(rules: Rules) -> str | None:
    stored = [each for each in (rules.base, *(each for _, each in rules.patterns)) if each is not None]
    known = [each for each in stored if each.format in _TABLES["bytes"]]
    return min(known, key=lambda each: each.bytes).format if known else None


def rules_of(found: Mapping[str, Any]) -> Rules:
    """Return the rules of a quantization_config. Sources: `docs/engines-really.md`, and the readers of these keys in
    vLLM 0.32 `layers/quantization`, transformers 5.24 `quantizers` and GPTQModel 7.7 `quantization/config.py`."""
    method = str(found.get("quant_method", ""))
    substring = "re:.*" if method == "awq" else ""
    names = [each for key in IGNORED for each in _texts(found.get(key))]
    wide = [(substring + (re.escape(name) if substring else name), None) for name in names]
    read = _DIALECTS.get(method, _plain)
    if section_of(found, "config_groups") and not section_of(found, "quantized_layers"):
        read = _groups
    rules = read(found)
    return rules._replace(patterns=(*wide, *rules.patterns))


def _texts(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else []
    return [str(inner) for each in listed for inner in (each if isinstance(each, list) else [each])]


def _sections(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and mappings of a mapping. None and False count as an empty one."""
    items = value.items() if isinstance(value, Mapping) else ()
    return [(str(name), each or {}) for name, each in items if not each or isinstance(each, Mapping)]


def _of_bits(keys: Mapping[str, Any], *names: str, scale: float = 2.0) -> Stored | None:
    """Return the format of `bits`, `group_size` and, of AutoRound, `data_type`. `names`: other names of the first."""
    bits = next((keys[name] for name in ("bits", *names) if keys.get(name) is not None), 16)
    group, kind = keys.get("group_size", keys.get("q_group_size")), str(keys.get("data_type", "int"))
    if not isinstance(bits, (int, float)) or bits >= 16:
        return None
    size, start = group if isinstance(group, int) and group > 0 else 0, f"{round(bits)}"
    own = {"mx": f"mxfp{start}", "nv": f"nvfp{start}", "fp": f"fp{start}"}.get(kind[:2])
    return Stored(own) if own else Stored(f"int{start}", size, scale)


@lru_cache
def _of_words(text: str) -> Stored | None:
    """Return the format that an algorithm or type means, by the first of the table's expressions that it contains."""
    found = next((name for pattern, name in _TABLES["words"].items() if re.search(pattern, text)), None)
    return Stored(found, only="A16" in text) if found else None


def _plain(found: Mapping[str, Any]) -> Rules:
    """One format: of the method, of ModelOpt's algorithms, or of the bits."""
    method, layers = str(found.get("quant_method", "")), section_of(found, "quantized_layers")
    if layers:
        listed = tuple((name, _of_words(str(section_of(layers, name).get("quant_algo")))) for name in layers)
        return Rules(None, listed)
    named = _TABLES["methods"].get(method)
    if (loads := [bits for bits in (4, 8) if found.get(f"load_in_{bits}bit") is True]) and method != "torchao":
        named = f"int{loads[0]}"
    given = str(found.get("quant_algo") or found.get("weights") or found.get("forward_dtype") or "")
    return Rules(Stored(named) if named else _of_words(given) if given else _of_bits(found, "w_bit"))


def _groups(found: Mapping[str, Any]) -> Rules:
    """compressed-tensors: a target names modules, or a class, such as Linear, if no name matches."""
    classes, named = dict[str, Stored | None](), list[tuple[str, Stored | None]]()
    for _, group in _sections(found.get("config_groups")):
        weights = section_of(group, "weights")
        stored = _of_arguments(weights)
        for target in _texts(group.get("targets")) or ["Linear"]:
            if re.fullmatch(r"[A-Z]\w*", target):
                classes.setdefault(target, stored)
            else:
                named.append((target, stored))
    others = [stored for name, stored in classes.items() if "Embedding" not in name]
    return Rules(classes.get("Linear", others[0] if others else None), tuple(named))


def _of_arguments(weights: Mapping[str, Any]) -> Stored | None:
    bits, group = weights.get("num_bits"), weights.get("group_size")
    size = group if isinstance(group, int) and group > 0 else 0
    if not isinstance(bits, int) or bits >= 16:
        return None
    if weights.get("type") == "float":
        return Stored({4: "mxfp4" if size == 32 else "nvfp4", 8: "fp8"}.get(bits, f"fp{bits}"))
    return Stored(f"int{bits}", size)


def _gptq(found: Mapping[str, Any]) -> Rules:
    """The first rule of `dynamic` that matches the beginning of a name decides: `-:` leaves it in 16 bits. The head has
    16 bits unless `lm_head` is true, whatever the rules."""
    base, dynamic, has_head = _of_bits(found), section_of(found, "dynamic"), found.get("lm_head") is True
    rules: list[tuple[str, Stored | None]] = [] if has_head else [(HEAD_MODULE, None)]
    for pattern in map(str, dynamic):
        stored = None if pattern.startswith("-:") else _of_bits({**found, **section_of(dynamic, pattern)})
        rules.append((f"re:{pattern.removeprefix('-:').removeprefix('+:')}", stored))
    if only := _texts(found.get("modules_in_block_to_quantize")):
        return Rules(None, (*rules, *((f"*{name}", base) for name in only)), has_head)
    return Rules(base, tuple(rules), has_head)


def _auto_round(found: Mapping[str, Any]) -> Rules:
    """Names come before regular expressions, which are searched for."""
    rules = [(name, _of_bits({**found, **own})) for name, own in _sections(found.get("extra_config"))]
    special = [bool(re.search(r"[*+?^$()\[\]{}|\\]", name)) for name, _ in rules]
    exact = [rule for rule, is_special in zip(rules, special, strict=True) if not is_special]
    searched = [(f"re:.*(?:{name})", s) for (name, s), is_special in zip(rules, special, strict=True) if is_special]
    return Rules(_of_bits(found), (*exact, *searched))


def _quark(found: Mapping[str, Any]) -> Rules:
    def stored_of(section: Mapping[str, Any]) -> Stored | None:
        weight = section.get("weight")
        first = next(iter(weight), None) if isinstance(weight, list) else weight  # nvfp4 has two scales
        keys = section_of({"": first}, "")
        kind, size = str(keys.get("dtype")), keys.get("group_size")
        if kind == "fp4":
            return Stored("nvfp4" if isinstance(weight, list) else "mxfp4")
        return Stored(known, size if isinstance(size, int) else 0) if (known := _TABLES["quark"].get(kind)) else None

    named = [(name, stored_of(section)) for name, section in _sections(found.get("layer_quant_config"))]
    types = section_of(section_of(found, "layer_type_quant_config"), "Linear")
    return Rules(stored_of(types or section_of(found, "global_quant_config")), tuple(named))


def _torchao(found: Mapping[str, Any]) -> Rules:
    """One configuration, or one for each module: names come before regular expressions for whole names."""
    given = found.get("quant_type")
    given = given.get("default") if isinstance(given, Mapping) else given
    data = section_of(section_of({"": given}, ""), "_data")
    modules = next(filter(None, (section_of(data, key) for key in ("fqn_to_config", "module_fqn_to_config"))), None)
    if modules is None:
        return Rules(_of_type(given))
    named = [(name, _of_type(modules[name])) for name in modules if name != "_default"]
    named.sort(key=lambda each: each[0].startswith("re:"))
    whole = [(f"re:(?:{name[3:]})$" if name.startswith("re:") else name, stored) for name, stored in named]
    return Rules(_of_type(modules.get("_default")), tuple(whole))


def _of_type(given: Any) -> Stored | None:
    """Return the format of a configuration of torchao: its class, or the old name of one."""
    keys = section_of({"": given}, "")
    stored, group = _of_words(str(keys.get("_type", given or ""))), section_of(keys, "_data").get("group_size")
    if stored is None or stored.format != "int4" or not isinstance(group, int):
        return stored
    return stored._replace(group=group)


def _hqq(found: Mapping[str, Any]) -> Rules:
    given = section_of(found, "quant_config")
    if "weight_quant_params" in given:
        return Rules(_of_bits(section_of(given, "weight_quant_params"), "nbits", scale=4.0))
    return Rules(
        None,
        tuple(
            (name, _of_bits(section_of(each, "weight_quant_params") or each, "nbits", scale=4.0))
            for name, each in _sections(given)
        ),
    )


def _mlx(found: Mapping[str, Any]) -> Rules:
    """MLX quantizes the head, too. Modules may have own formats, or False. Affine groups have a scale and a bias."""
    is_affine = found.get("mode", "affine") == "affine"

    def stored_of(keys: Mapping[str, Any]) -> Stored | None:
        own = {**found, **keys, "data_type": "int" if is_affine else "nv" if found.get("mode") == "nvfp4" else "mx"}
        return _of_bits(own, scale=4.0)

    listed = [(name, stored_of(keys) if keys else None) for name, keys in _sections(found)]
    listed += [(name, None) for name, value in found.items() if value is False]
    return Rules(stored_of({}), tuple(listed), head=True)


_DIALECTS = {"gptq": _gptq, "auto-round": _auto_round, "intel/auto-round": _auto_round, "quark": _quark}
_DIALECTS |= {"torchao": _torchao, "hqq": _hqq, "": lambda found: (_mlx if "bits" in found else _plain)(found)}


def block_sizes(found: Mapping[str, Any]) -> list[int]:
    """Return the columns and rows that share a scale in a quantization_config, or its number of weights in a group: of
    several groups, those of the one with the fewest bits."""
    groups = [section_of(group, "weights") for _, group in _sections(found.get("config_groups"))]
    known = [(stored.bytes, keys) for keys in groups if (stored := _of_arguments(keys))]
    keys = min(known, key=lambda each: each[0])[1] if known else next(filter(None, groups), found)
    blocks = keys.get("block_structure") or found.get("weight_block_size") or [keys.get("group_size")]
    return [size for size in blocks if isinstance(size, int) and size > 0] if isinstance(blocks, list) else []


class Share(NamedTuple):
    """The format of most weights of a part of a model, and the bytes per weight of all of them. None: 16 bits."""

    stored: Stored | None
    bytes: float


def shares(model: Model, found: Mapping[str, Any], usual: str) -> Mapping[str, Share]:
    """Return the share of each group of products (see `Product`), of the head and of multi-token prediction.

    `usual`: the format of a quantization_config that names none.
    """
    return _shares(model, json.dumps(found, default=str), usual)


@lru_cache(maxsize=256)
def _shares(model: Model, text: str, usual: str) -> Mapping[str, Share]:
    rules = rules_of(json.loads(text))
    if _narrowest(rules) is None:
        rules = rules._replace(base=Stored(usual))
    matcher, found = _Matcher(rules.patterns), dict[str, Counter[Stored | None]]()
    known, text = dict[Any, Any](), " ".join(pattern for pattern, _ in rules.patterns)
    words, is_numbered = frozenset(re.findall(r"\w+", text)), "layers" in text
    for number, layer in enumerate(own_layers(model)):
        key = layer, number if is_numbered else 0
        if key not in known:
            known[key] = [
                (product.group, matcher.first(names, rules.base), weights)
                for part in layer.parts
                for product in part.products(model.hidden_size)
                if product.group
                for names, weights in _linears(part, product, number, words)
            ]
        for group, stored, weights in known[key]:
            found.setdefault(group, Counter())[stored] += weights
    starts = ("mtp.layers.0", f"model.layers.{model.num_layers}")
    draft = [f"{start}.mlp.{'experts.0.' * bool(model.experts)}down_proj" for start in starts]
    found[MTP] = Counter({matcher.first(draft, rules.base): 1})
    found[HEAD] = Counter({matcher.first((HEAD_MODULE,), rules.base if rules.head else None): 1})
    return {group: _share(counts) for group, counts in found.items()}


def _share(counts: Counter[Stored | None]) -> Share:
    total = sum(counts.values())
    bytes_ = sum(number * (2.0 if stored is None else stored.bytes) for stored, number in counts.items())
    return Share(counts.most_common(1)[0][0], bytes_ / total)


def _linears(part: Part, product: Product, number: int, words: Collection[str]) -> Iterator[tuple[list[str], float]]:
    """Yield the names that checkpoints give to each linear layer of a product, with its number of weights.

    Names of families that `words` do not contain are left out: they match nothing.
    """
    modules, renamed = _TABLES["modules"], _TABLES["linears"].get(product.name, {})
    kind = part.label if product.group == "attention" else product.group
    usual, *others = modules.get(kind, modules["attention"])
    stems = [usual, *(each for each in others if any(word in words for word in each.split(".")))]
    starts = ["model", *(each for word, named in _TABLES["starts"].items() if word in words for each in named)]
    places = [f"{start}.layers.{number}.{stem}" for start in starts for stem in stems]
    total = sum(each.width for each in product.layers)
    for linear in product.layers:
        ends = renamed.get(linear.name) or [linear.name]
        yield [f"{place}.{end}" for place in places for end in ends], product.weights * linear.width / total


class _Matcher:
    """Finds the first pattern that matches a name. Names are looked up: lists may have thousands of them."""

    def __init__(self, patterns: Iterable[tuple[str, Stored | None]]) -> None:
        self._names, self._expressions = dict[str, int](), list[tuple[int, re.Pattern[str]]]()
        self._stored = list[Stored | None]()
        for rank, (pattern, stored) in enumerate(patterns):
            self._stored.append(stored)
            if (expression := _expression(pattern)) is not None:
                self._expressions.append((rank, expression))
            elif not pattern.startswith("re:"):
                self._names.setdefault(pattern.removesuffix(".weight"), rank)

    def first(self, names: Iterable[str], base: Stored | None) -> Stored | None:
        """Return the format of the first pattern that matches one of the names of a module, else `base`."""
        ranks = [rank for name in names for rank in (self._listed(name), self._matched(name)) if rank is not None]
        return self._stored[min(ranks)] if ranks else base

    def _listed(self, name: str) -> int | None:
        words = name.split(".") if self._names else []
        runs = (".".join(words[start:end]) for end in range(len(words), 0, -1) for start in range(end))
        return min((self._names[run] for run in runs if run in self._names), default=None)

    def _matched(self, name: str) -> int | None:
        return next((rank for rank, each in self._expressions if each.match(name)), None)


def _expression(pattern: str) -> re.Pattern[str] | None:
    """Return the regular expression of a pattern. None for a name, and for an expression that may take very long."""
    text = pattern.removeprefix("re:")
    if text == pattern:
        return re.compile(f"(?:.*\\.)?{translate(text)}") if re.search(r"[*?\[]", text) else None
    if len(text) > 400 or re.search(r"[+*}]\)*[+*{]", text):
        return None
    with suppress(re.error):
        return re.compile(text)
    return None
