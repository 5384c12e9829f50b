"""Reads a model from a Hugging Face config.json. The sizes of images come from preprocessor_config.json.

A family or kind of layers that is not known is read as far as its keys go, and named in `Model.unread`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from typing import Any

from pydantic import AliasChoices, AliasGenerator, BaseModel, ConfigDict

from flagcore.domain.model import Layer, Mixer, Model
from flagcore.domain.units import Layers, NoExperts, NoLayers, NoSize, Size
from flagcore.errors import SpecError, join_errors
from flagcore.loading.entry_points import installed, load_checked, subclass_of
from flagcore.spec.plain_data import KeyPath, spec_error
from flagcore.spec.shapes import check_model
from flagcore.spec.validate import checked, located
from flagcore_models import keys as config_keys
from flagcore_models.layers import attention_of, network_of
from flagcore_models.mixers.attention import Attention, Indexer

FULL, WINDOW = "full_attention", "sliding_attention"
"""The names of the kinds of layers in models that do not list their layers."""
INDEXED = "indexed"
"""The kind of layers that have an indexer, if not all layers with attention have one."""
DENSE, EXPERTS = "dense", "experts"
"""The kinds of feed-forward networks."""
SIZES = {"num_attention_heads": "num_heads", "num_key_value_heads": "groups", "head_dim": "head_dim"}
SIZES |= {"v_head_dim": "value_dim", "kv_lora_rank": "latent_rank", "qk_nope_head_dim": "head_dim"}
"""The fields of `Attention` for keys of a config.json, which `per_layer_config` gives for layers that differ."""
BASIC = (DENSE, EXPERTS, "attention", "window", "pieces", INDEXED)
"""The kinds of layers that need no package."""
MOST_RUNS = 1_000
"""The maximum number of layers that a pass through a model with loops may run."""


class Config(BaseModel):
    """The keys of config.json that describe a `Model`."""

    model_config = ConfigDict(
        extra="ignore",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        alias_generator=AliasGenerator(
            validation_alias=lambda name: AliasChoices(
                name, *(key for key, meant in config_keys.ALIASES.items() if meant == name)
            )
        ),
    )

    num_hidden_layers: Layers
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    quantization_config: dict[str, Any] | None = None
    num_key_value_heads: Size | None = None
    head_dim: NoSize | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_layernorm: bool = False
    gated_linear_unit: bool = True
    num_experts: NoExperts | None = None
    zero_expert_num: NoLayers = 0
    enable_moe_block: bool | None = None
    num_experts_per_tok: NoSize | None = None
    moe_intermediate_size: Size | None = None
    moe_latent_size: Size | None = None
    shared_expert_intermediate_size: NoSize = 0
    n_shared_experts: NoSize | None = None
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[NoLayers] | None = None
    first_k_dense_replace: NoLayers | None = None
    moe_layer_freq: Size | list[int] = 1
    moe_layers_enum: str | None = None
    expert_layer_offset: NoLayers | None = None
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: NoSize | None = None
    v_head_dim: Size | None = None
    num_nextn_predict_layers: NoLayers | None = None
    mtp_use_repeated_layer: bool = False
    mtp_dense: bool = False
    moe_bias: bool = False
    per_layer_config: dict[str, dict[str, Any]] | None = None
    num_attention_heads_per_layer: list[Size] | None = None
    intermediate_sizes: list[NoSize] | None = None
    layer_types: str | list[str] | list[int] | None = None
    full_attention_interval: Size | None = None
    full_attention_offset: NoLayers | None = None
    full_attention_layers: list[int] | None = None
    first_layer: NoLayers = 0
    rest_of_layers: str | None = None
    sliding_window: NoSize | None = None
    use_sliding_window: bool = True
    max_window_layers: NoLayers = 0
    num_kv_shared_layers: NoLayers = 0
    loop_start: NoLayers = 0
    loop_end: Layers | None = None
    layers_after_loop: NoLayers = 0
    loop_passes: Layers = 1
    num_mem_blocks: Layers | None = None
    low_cycles: Layers | None = None
    high_cycles: Layers = 1
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: NoSize = 0
    final_logit_softcapping: float | None = None
    caps_in_fp32: bool = False
    hc_mult: Size = 1
    hc_lowrank: NoSize = 0
    hc_mixes: bool = False
    mlp_layer_types: list[str] | None = None
    linear_num_key_heads: Size | None = None
    attention_output_gate: bool = False
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    index_topk: Size | None = None
    index_topk_blocks: Size | None = None
    index_block_size: Size = 1
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: Size = 1
    index_skip_topk_offset: NoLayers = 2
    n_group: NoSize | None = None
    topk_group: NoSize | None = None

    def model(self, kinds: Mapping[str, str], keys: Mapping[str, Any], name: str) -> Model:
        """Return the model with this name. Raises SpecError for unsupported features.

        `kinds`: what the names of layers mean in the model's family. `keys`: all keys of the config.json, and defaults.
        """
        same = {"num_attention_heads", "hidden_size", "vocab_size", "qk_layernorm", "gated_linear_unit", "q_lora_rank"}
        same |= {"kv_lora_rank", "v_head_dim", "attention_output_gate"}
        same |= {"moe_bias", "mtp_dense", "mtp_use_repeated_layer"}
        self._check_layers()
        blocks = self._blocks(kinds)
        order = self._order()
        networks = [network for number in order for _, network in blocks[number]]
        width, shared = self.intermediate_size, self.num_kv_shared_layers
        if self.use_double_wide_mlp:  # the mean of all layers
            width = round(width * (1 + shared / self.num_hidden_layers))
        model = Model(
            name=name,
            **self.model_dump(include=same),
            num_layers=len(networks),
            ffn_hidden_size=width,
            layer_embedding_size=self.hidden_size_per_layer_input,
            logit_cap_bytes=(4 if self.caps_in_fp32 else 2) if self.final_logit_softcapping else 0,
            residual_streams=self.hc_mult,
            residual_weights=self._residual_weights(),
            num_query_groups=self.num_key_value_heads or self.num_attention_heads,
            kv_channels=self.qk_nope_head_dim or self._head_width(),
            untie_embeddings_and_output_weights=not self.tie_word_embeddings,
            add_qkv_bias=self.attention_bias or self.qkv_bias,
            multi_latent_attention=self.kv_lora_rank is not None,
            qk_head_dim=self.qk_nope_head_dim,
            qk_pos_emb_head_dim=self.qk_rope_head_dim,
            mtp_num_layers=self.num_nextn_predict_layers or 0,
            **(self._experts(networks) if EXPERTS in networks else {}),
        )
        return replace(model, layers=self._layers(model, blocks, order, keys))

    def _check_layers(self) -> None:
        """Raise SpecError if a key names a layer that does not exist, or experts have no number."""
        size, first = self.num_hidden_layers + (self.num_nextn_predict_layers or 0), self.first_layer
        named: dict[str, list[int]] = {
            "mlp_only_layers": self.mlp_only_layers or [],
            "full_attention_layers": [each - first for each in self.full_attention_layers or ()],
            "moe_layers_enum": [int(each) for each in re.findall(r"\d+", self.moe_layers_enum or "")],
            "per_layer_config": [int(each) if each.isdecimal() else -1 for each in self.per_layer_config or ()],
        }
        for key, layers in named.items():
            if wrong := [each for each in layers if not 0 <= each < size]:
                problem = f"is not a layer of a model with num_hidden_layers = {self.num_hidden_layers}"
                raise spec_error(key, problem, value=wrong[0], fix="remove it, or correct num_hidden_layers")
        if self.num_experts == 0 and self.num_experts_per_tok:
            problem = f"must not be 0 if num_experts_per_tok = {self.num_experts_per_tok}"
            raise spec_error("num_experts", problem, value=0, fix="give the number of experts, or set both to 0")

    def _blocks(self, kinds: Mapping[str, str]) -> list[list[tuple[str, str]]]:
        """Return the blocks of each layer: a kind of mixer, or "" for none, and a kind of network, or ""."""
        names = self.layer_names()
        if len(names) != self.num_hidden_layers:
            problem = f"must be num_hidden_layers = {self.num_hidden_layers} kinds"
            raise spec_error("layer_types", problem, value=len(names), fix="list the kind of each layer")
        of_names = [kinds.get(name, "attention") for name in names]
        is_blocks, blocks = any(kind in (DENSE, EXPERTS) for kind in of_names), list[list[tuple[str, str]]]()
        for number, kind in enumerate(of_names):
            dense = not self.num_experts or self.enable_moe_block is False or self._is_dense(number)
            default = "" if is_blocks or " " in kind else DENSE if dense else EXPERTS
            blocks.append([])
            for block in kind.split():
                mixer, _, network = block.partition("/")
                if mixer == "attention" and INDEXED not in of_names:
                    mixer = INDEXED
                blocks[-1].append(("", mixer) if mixer in (DENSE, EXPERTS) else (mixer, network or default))
        return blocks

    def _layers(
        self, model: Model, blocks: list[list[tuple[str, str]]], order: list[int], keys: Mapping[str, Any]
    ) -> tuple[Layer, ...]:
        """Return the layers of a model in the `order` in which they run. Empty if they follow from its sizes."""
        known, runs = dict[tuple[Any, ...], Layer](), list[list[Layer]]()
        heads, widths = self.num_attention_heads_per_layer or (), self.intermediate_sizes or ()
        of_layers = {layer.lstrip("0") or "0": given for layer, given in (self.per_layer_config or {}).items()}
        for number, layer in enumerate(blocks):
            reuses = number >= self.num_hidden_layers - self.num_kv_shared_layers
            shares = self._shares_index(number)
            sizes = {SIZES[key]: size for key, size in of_layers.get(str(number), {}).items() if key in SIZES}
            if number < len(heads):
                sizes["num_heads"] = heads[number]
            runs.append([])
            width = widths[number] if number < len(widths) else model.ffn_hidden_size
            for mixer, network in layer:
                key = mixer, network, width, reuses, shares, *sizes.items()
                if key not in known:
                    found = self._mixer(model, mixer, keys, sizes, reuses=reuses, shares=shares) if mixer else None
                    own = replace(model, ffn_hidden_size=width) if network == DENSE else model
                    known[key] = Layer(mixer=found, network=network_of(own, network))
                runs[-1].append(known[key])
        first = dict[int, int]()
        layers = [
            replace(each, repeats=first.setdefault(number, place) < place)
            for place, number in enumerate(order)
            for each in runs[number]
        ]
        blocks_with_attention = [place for place, each in enumerate(layers) if isinstance(each.mixer, Attention)]
        for place in blocks_with_attention[self.num_mem_blocks or len(layers) :]:  # Zamba2 runs the first ones again
            layers[place] = replace(layers[place], repeats=True)
        rest = {each.network for each in layers[model.moe_first_dense_layers :]}
        is_plain = {each.mixer for each in layers} == {attention_of(model)} and len(rest) == 1
        return () if is_plain and len(order) == len(runs) else tuple(layers)

    def _order(self) -> list[int]:
        """Return the numbers of the layers in the order in which they run: those of a loop several times.

        The first half runs in each of the low cycles of a high cycle, which ends with the second half (HRM-Text).
        Source: transformers 5.24 `models/dory`, `models/inkling2_loop` and `models/hrm_text`.
        """
        size, start = self.num_hidden_layers, self.loop_start
        if size * max(self.loop_passes, (self.low_cycles or 1) * self.high_cycles) > MOST_RUNS:
            problem, fix = f"runs its layers more than {MOST_RUNS:,} times", "give fewer layers, loops or cycles"
            raise spec_error("num_hidden_layers", problem, value=size, fix=fix)
        if self.low_cycles:
            return [*[*range(size // 2)] * self.low_cycles, *range(size // 2, size)] * self.high_cycles
        end = self.loop_end or size - self.layers_after_loop
        if not start <= end <= size:
            fix = f"give layers from 0 to num_hidden_layers = {size}"
            raise spec_error("loop_start", "is not a loop of layers", value=f"{start} to {end}", fix=fix)
        return [*range(start), *[*range(start, end)] * self.loop_passes, *range(end, size)]

    def unread(self, kinds: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the keys of single layers that are not read, and the names of layers that are not in `kinds`."""
        for own in (self.per_layer_config or {}).values():
            yield from ((f"per_layer_config.{key}", str(value)) for key, value in own.items() if key not in SIZES)
        if unknown := sorted({*self.layer_names()}.difference(kinds)):
            yield "layer_types", ", ".join(unknown)

    def layer_names(self) -> list[str]:
        """Return the names of all layers.

        Lists may end with the layers of multi-token prediction. Models that do not list their layers have full
        attention in `full_attention_layers`, which count from `first_layer`, in every n-th layer, where n is
        `full_attention_interval`, and in the first `max_window_layers`.
        """
        size = self.num_hidden_layers
        if self.layer_types:
            names = [str(each) for each in self.layer_types]
            return names[:size] if len(names) == size + (self.num_nextn_predict_layers or 0) else names
        linear = "linear_attention" if self.linear_num_key_heads else None
        other = self.rest_of_layers or linear or (WINDOW if self.sliding_window else FULL)
        full = self._full_layers()
        return [FULL if layer in full else other for layer in range(size)]

    def _full_layers(self) -> set[int]:
        listed, interval = self.full_attention_layers, self.full_attention_interval
        full = {*range(self.max_window_layers), *(each - self.first_layer for each in listed or ())}
        if not interval or listed is not None:
            return full
        offset = interval - 1 if self.full_attention_offset is None else self.full_attention_offset
        return full.union(layer for layer in range(self.num_hidden_layers) if layer % interval == offset)

    def _mixer(
        self, model: Model, kind: str, keys: Mapping[str, Any], sizes: Mapping[str, int], *, reuses: bool, shares: bool
    ) -> Mixer:
        """Return the mixer of one of KINDS.

        `sizes`: those of its attention that differ. `reuses`: whether it uses keys and values of an earlier layer.
        `shares`: whether it uses the choice of its indexer.
        """
        if kind not in ("attention", "window", "pieces", INDEXED):
            return _mixer(kind, keys)
        table = config_keys.MIXERS["window" if kind == "window" else "attention"]
        own: dict[str, Any] = {key: found[0][1] for key in table if (found := config_keys.given_keys(keys, table[key]))}
        if kind == INDEXED and (indexer := self._indexer(shares=shares)):
            own["indexer"] = indexer
        if kind in ("window", "pieces"):
            is_narrow = self.use_sliding_window and self.sliding_window
            own |= {"window": self.sliding_window, "pieces": kind == "pieces"} if is_narrow else {}
        elif self.attention_k_eq_v:
            own["projections"] = 1
        else:
            own.pop("groups", None)  # Gemma 4 reads their heads only then
        own |= {"projections": 0} if reuses else {}
        return attention_of(model, **{**own, **sizes})

    def _indexer(self, *, shares: bool) -> Indexer | None:
        top_k = self.index_topk or (self.index_topk_blocks or 0) * self.index_block_size
        heads, width = self.index_n_heads, self.index_head_dim
        if not (top_k and heads and width):
            return None
        return Indexer(heads=0 if shares else heads, head_dim=0 if shares else width, top_k=top_k)

    def _shares_index(self, layer: int) -> bool:
        """Return whether a layer uses the choice of an earlier layer's indexer (transformers `GlmMoeDsaConfig`)."""
        if listed := self.indexer_types or self.index_topk_pattern:
            return layer < len(listed) and listed[layer] in ("shared", "S")
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq != 0

    def _residual_weights(self) -> int:
        """Return the number of weights of a hyper-connection: a product from all streams (transformers 5.24
        `models/deepseek_v4`, `models/hy_v4`), or gates of low rank with a norm (`models/qwen4_exp`)."""
        streams = self.hc_mult
        outputs = 2 * self.hc_lowrank + streams + 1 if self.hc_lowrank else streams * (2 + streams * self.hc_mixes)
        return streams * self.hidden_size * outputs * (streams > 1)

    def _head_width(self) -> int:
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            problem = f"must be divisible by num_attention_heads = {self.num_attention_heads}"
            raise spec_error("hidden_size", problem, value=self.hidden_size, fix="change it, or give head_dim")
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _experts(self, networks: list[str]) -> dict[str, Any]:
        """Return the fields of `Model` for mixture-of-experts layers. `networks`: the kind of that of each layer."""
        width = self.moe_intermediate_size or self.intermediate_size
        groups = self.n_group if self.n_group and self.n_group > 1 else 0
        shared = self.shared_expert_intermediate_size or (self.n_shared_experts or 0) * width
        if self.enable_moe_block:  # Gemma 4: the dense network is beside the experts
            shared = self.intermediate_size
        chosen, experts = self.num_experts_per_tok or 0, self.num_experts or 0
        if self.zero_expert_num:  # LongCat: the others of those that are chosen do nothing
            chosen = round(chosen * experts / (experts + self.zero_expert_num))
        return {
            "moe_first_dense_layers": next((at for at, network in enumerate(networks) if network != DENSE), 0),
            "num_moe_experts": self.num_experts,
            "moe_router_topk": chosen,
            "moe_router_num_groups": groups,
            "moe_router_group_topk": (self.topk_group or groups) if groups else 0,
            "moe_ffn_hidden_size": width,
            "moe_latent_size": self.moe_latent_size,
            "moe_shared_expert_intermediate_size": shared or None,
        }

    def _is_dense(self, layer: int) -> bool:
        if self.mlp_layer_types:
            return self.mlp_layer_types[layer % len(self.mlp_layer_types)] in ("dense", "mlp")
        if self.moe_layers_enum is not None:
            return str(layer) not in self.moe_layers_enum.replace(" ", "").split(",")
        if isinstance(self.moe_layer_freq, list):
            return not self.moe_layer_freq[layer % len(self.moe_layer_freq)]
        step = self.decoder_sparse_step
        offset = step - 1 if self.expert_layer_offset is None else self.expert_layer_offset
        return (
            layer % step != offset
            or bool(layer % self.moe_layer_freq)
            or layer < (self.first_k_dense_replace or 0)
            or layer in (self.mlp_only_layers or ())
        )


def _mixer(name: str, keys: Mapping[str, Any]) -> Mixer:
    """Return the mixer `name` of MIXERS with the sizes that the keys of a config.json give. Raises SpecError."""
    table = config_keys.MIXERS.get(name, {})
    kind, sizes = mixer_class(table.get("class", name)), dict[str, int]()
    if kind is None:
        problem = "has kinds of layers that no installed package describes"
        fix = "install the package with an entry point of this name"
        raise spec_error("layer_types", problem, value=name, fix=fix)
    for field in fields(kind):
        names = table.get(field.name, [])
        names, found = names if isinstance(names, list) else [names], config_keys.given_keys(keys, names)
        if not found and field.default is MISSING:
            problem = f"is missing, but the model has layers with {kind.label}"
            raise spec_error((names or [field.name])[0], problem, fix="give its size")
        for key, value in found[:1]:
            if not isinstance(value, int) or value < 1:
                raise spec_error(key, "must be a positive integer", value=value, fix="give its size")
            sizes[field.name] = value
    return kind(**sizes)


@cache
def mixer_class(name: str) -> type[Mixer] | None:
    """Return the mixer with the entry point `name` (group `flagcore.mixers`), or None. Raises NoDevice if it cannot be
    loaded."""
    points = installed("flagcore.mixers").get(name)
    return load_checked("mixer", points, partial(subclass_of, Mixer)) if points else None


def model_of_config(config: Mapping[str, Any], *, name: str, file: str) -> Model:
    """Return the model that a config.json describes, or the text model of a multimodal one. Raises SpecError."""
    path: KeyPath = ()
    config = config_keys.section_of(config, "thinker_config") or config
    whole, kind = config, config.get("model_type")
    if inner := config_keys.section_of(config, "text_config"):
        outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        config, path = {**inner, **outer}, ("text_config",)
        kind = config.get("model_type", kind)
    family = config_keys.FAMILIES.get(kind) if isinstance(kind, str) else None
    own = family or {}
    try:
        read = config_keys.keys_of_family(config, family)
        kinds = {**config_keys.KINDS, **own.get("kinds", {})}
        known = checked(Config, read)
        unread = [*config_keys.unread_keys(whole, {*read, *own.get("renamed", {})}), *known.unread(kinds)]
        unread += [("model_type", str(kind))] if family is None else []
        try:
            model = known.model(kinds, read, name)
        except SpecError:
            if family is not None:
                raise
            kinds = {kind: meant if meant in BASIC else "attention" for kind, meant in kinds.items()}
            unread.append(("layer_types", ", ".join(sorted({*known.layer_names()}))))
            model = known.model(kinds, read, name)
        model = replace(model, family=str(kind or ""), unread=tuple(dict(unread).items()))
        check_model(model, config_keys.NAMES)
    except SpecError as error:
        found = error
    else:
        return model
    raise join_errors([located(_as_written(each, config), path, file) for each in found.problems])


def _as_written(error: SpecError, config: Mapping[str, Any]) -> SpecError:
    """Return an error with the key that `config` has in place of its usual name."""
    written = [key for key in config if error.key == config_keys.ALIASES.get(key, key) and config[key] is not None]
    key = error.key if error.key in (*written, "") else next(iter(written), error.key)
    return spec_error(key, error.problem, value=error.value, fix=error.fix, file=error.file)
