"""Names and shapes of a model's tensors, from the headers of its weights or from its `config.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from prime_rl.checks.disk import PackedShape, default_hub_cache, snapshot_in_cache, tensor_shapes
from prime_rl.checks.model_description import ModelDescription, is_of_tower
from prime_rl.checks.model_files import read_config
from prime_rl.configs.model import QuantizationConfig
from prime_rl.utils.errors import StartFault

# Without weights: shapes of the families of models that are known, derived from `config.json`.


Shape = tuple[int, ...]
Tensors = dict[str, Shape]


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a family of decoders from Llama."""

    qkv_bias: bool | None = False
    """None reads `attention_bias`."""
    out_bias: bool | None = False
    """None reads `attention_bias`."""
    mlp_bias: bool | None = False
    """None reads `mlp_bias`."""
    head_norms: bool = False
    """A norm of each query and key head."""
    wide_norms: bool = False
    """A norm of all queries and one of all keys."""
    norms: int = 2
    """Norms of a block, of the hidden size each."""
    norm_bias: bool = False
    has_norm_weights: bool = True
    is_fused: bool = False
    """One matrix for queries, keys and values, one for gate and up."""
    is_fused_mlp: bool = False
    is_gated: bool = True
    is_tied: bool = False
    """Value of `tie_word_embeddings` if the config has none."""
    has_experts: bool = False
    expert_width: str = "moe_intermediate_size"
    """Key of the inner width of an expert."""


_MOST, _MOST_LAYERS = 10**9, 10**4
_REQUIRED = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "vocab_size": (),
}
"""Sizes that every model has, and their other names."""
_OPTIONAL = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "kv_lora_rank",
)
_LLAMA = Family(qkv_bias=None, out_bias=None, mlp_bias=None)
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias=None, out_bias=None, head_norms=True),
    "qwen2_moe": Family(qkv_bias=True, has_experts=True),
    "qwen3_moe": Family(qkv_bias=None, out_bias=None, head_norms=True, has_experts=True),
    "mixtral": Family(has_experts=True, expert_width="intermediate_size"),
    "olmoe": Family(qkv_bias=None, out_bias=None, wide_norms=True, has_experts=True, expert_width="intermediate_size"),
    "olmo": Family(qkv_bias=None, out_bias=None, has_norm_weights=False),
    "olmo2": Family(qkv_bias=None, out_bias=None, wide_norms=True),
    "olmo3": Family(qkv_bias=None, out_bias=None, wide_norms=True),
    "gemma": Family(qkv_bias=None, out_bias=None, is_tied=True),
    "gemma2": Family(qkv_bias=None, out_bias=None, norms=4, is_tied=True),
    "gemma3_text": Family(qkv_bias=None, out_bias=None, norms=4, head_norms=True, is_tied=True),
    "phi3": Family(is_fused=True),
    "smollm3": Family(qkv_bias=None, out_bias=None, mlp_bias=None, is_tied=True),
    "granite": _LLAMA,
    "seed_oss": Family(qkv_bias=True),
    "glm": Family(qkv_bias=None, is_fused_mlp=True),
    "glm4": Family(qkv_bias=None, is_fused_mlp=True, norms=4),
    "exaone4": Family(head_norms=True),
    "starcoder2": Family(qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, is_gated=False, is_tied=True),
}
"""By `model_type`. Other families are estimated from the headers of their weights."""


def tensors_of_config(config: Mapping[str, Any]) -> Tensors:
    """The tensors of a model that has only a config, as they are named on the hub.

    Raises:
        StartFault: the family is not in `FAMILIES`, or the config lacks a size.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise StartFault(f"models of type {kind!r} are estimated from their weights, which are not here")
    family = FAMILIES[kind]
    try:
        tensors = dict(_root(config, family))
        for index in range(config["num_hidden_layers"]):
            tensors |= {f"model.layers.{index}.{name}": shape for name, shape in _block(config, family, index)}
    except (KeyError, TypeError) as error:
        raise StartFault(f"its config.json is not a complete config of type {kind!r}: {error}") from error
    return tensors


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether head and embedding share their weights, by the config or the family's default."""
    family = FAMILIES.get(str(config.get("model_type")), Family(is_tied=True))
    return bool(config.get("tie_word_embeddings", family.is_tied))


def number(config: Mapping[str, Any], key: str) -> int | None:
    """A size in a config; None if it is not set.

    Raises:
        StartFault: it is not a positive integer.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 < value < _MOST:
        raise StartFault(f"its config.json has {key} = {str(value)[:40]}, which is not a size")
    return int(value)


def head_dim(config: Mapping[str, Any]) -> int:
    return number(config, "head_dim") or config["hidden_size"] // config["num_attention_heads"]


def with_usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a language model, also of one inside a larger model, with Llama's names for its sizes.

    Raises:
        StartFault: a size that every model has is missing, or a size is no number.
    """
    named = {**config, **ModelDescription(config).language_part}
    for key, others in _REQUIRED.items():
        value = next((number(named, name) for name in (key, *others) if name in named), None)
        if value is None:
            raise StartFault(f"its config.json has no {key}")
        named[key] = value
    if named["num_hidden_layers"] > _MOST_LAYERS:
        raise StartFault(f"its config.json has num_hidden_layers = {named['num_hidden_layers']}, which is not valid")
    if (layers := ModelDescription(named).layers_on_text) is not None:
        named["num_hidden_layers"] = len(layers)
    for key in _OPTIONAL:
        number(named, key)
    named.setdefault("max_position_embeddings", named.get("n_positions"))
    return named


def _root(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Shape]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield from _norm("model.norm", hidden, family)
    if not is_tied(config):
        yield "lm_head.weight", (vocab, hidden)


def _block(config: Mapping[str, Any], family: Family, index: int) -> Iterator[tuple[str, Shape]]:
    for number in range(family.norms):
        yield from _norm(f"norm_{number}", config["hidden_size"], family)
    yield from _attention(config, family)
    if family.has_experts and _is_sparse(config, index):
        yield from _experts(config, family)
    else:
        yield from _mlp("mlp", config["hidden_size"], config["intermediate_size"], family, config)


def _attention(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Shape]]:
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], head_dim(config)
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    has_bias = _flag(family.qkv_bias, config, "attention_bias")
    projections = {"qkv_proj": queries + 2 * keys} if family.is_fused else {}
    for name, out in (projections or {"q_proj": queries, "k_proj": keys, "v_proj": keys}).items():
        yield from _linear(f"self_attn.{name}", hidden, out, has_bias)
    yield from _linear("self_attn.o_proj", queries, hidden, _flag(family.out_bias, config, "attention_bias"))
    if family.head_norms or family.wide_norms:
        yield "self_attn.q_norm.weight", (width if family.head_norms else queries,)
        yield "self_attn.k_norm.weight", (width if family.head_norms else keys,)


def _mlp(path: str, hidden: int, inner: int, family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    has_bias = _flag(family.mlp_bias, config, "mlp_bias")
    if not family.is_gated:
        yield from _linear(f"{path}.c_fc", hidden, inner, has_bias)
        yield from _linear(f"{path}.c_proj", inner, hidden, has_bias)
        return
    if family.is_fused or family.is_fused_mlp:
        yield from _linear(f"{path}.gate_up_proj", hidden, 2 * inner, has_bias)
    else:
        yield from _linear(f"{path}.gate_proj", hidden, inner, has_bias)
        yield from _linear(f"{path}.up_proj", hidden, inner, has_bias)
    yield from _linear(f"{path}.down_proj", inner, hidden, has_bias)


def _experts(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config["hidden_size"], config[family.expert_width]
    # Transformers writes either name.
    count = config.get("num_experts") or config["num_local_experts"]
    yield "mlp.gate.weight", (count, hidden)
    yield "mlp.experts.gate_up_proj", (count, 2 * inner, hidden)
    yield "mlp.experts.down_proj", (count, hidden, inner)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _mlp("mlp.shared_expert", hidden, shared, family, config)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _norm(path: str, width: int, family: Family) -> Iterator[tuple[str, Shape]]:
    if family.has_norm_weights:
        yield f"{path}.weight", (width,)
    if family.norm_bias:
        yield f"{path}.bias", (width,)


def _linear(path: str, width: int, out: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{path}.weight", (out, width)
    if has_bias:
        yield f"{path}.bias", (out,)


def _flag(fixed: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get(key)) if fixed is None else fixed


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(\w+)\.weight$")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


@dataclass(frozen=True)
class ModelShape:
    """A causal language model: its text config and the shapes of its tensors."""

    config: Mapping[str, Any]
    tensors: Tensors
    """As named on the hub, without a tied head. The experts of a layer are stacked: [experts, out, in]."""
    tower: Tensors = field(default_factory=dict)
    """The tensors outside the language model, by their names in the checkpoint."""
    packed: QuantizationConfig | None = None
    """How the files hold weights, if they do so in 4 bits."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """The config of the checkpoint, with those of its parts."""

    @classmethod
    def of(cls, name: str, num_layers: int | None = None) -> ModelShape:
        """The model at `name`: a directory, or a hub id in the local cache. `num_layers` keeps only the first.

        Raises:
            StartFault: there is no config, or neither weights nor a known family.
        """
        folder = Path(name) if Path(name).is_dir() else snapshot_in_cache(name, default_hub_cache())
        if folder is None:
            raise StartFault(f"not in the local cache: run `hf download {name} config.json` first")
        stated = read_config(folder)
        config = with_usual_names(stated)
        # The language part of a checkpoint of several parts is trained alone.
        shapes = tensor_shapes(folder)
        held = {name: shape for name, shape in shapes.items() if not is_of_tower(name)}
        if (layers := ModelDescription(stated).layers_on_text) is not None:
            held = {_with_number(name, layers): each for name, each in held.items() if _layer_of(name) in (-1, *layers)}
        tensors = _stacked(held) or tensors_of_config(config)
        if is_tied(config):
            tensors = {key: shape for key, shape in tensors.items() if not key.endswith("lm_head.weight")}
        if num_layers is not None:
            config = {**config, "num_hidden_layers": min(num_layers, config["num_hidden_layers"])}
            tensors = {key: shape for key, shape in tensors.items() if _layer_of(key) < num_layers}
        tower = {name: shape for name, shape in shapes.items() if is_of_tower(name)}
        return cls(config, tensors, tower, ModelDescription(config).packed, stated)

    @property
    def of_tower(self) -> ModelShape:
        """The tower as a model of its own, which is stored as numbers: bitsandbytes' files may have it in 4 bits."""
        last = max(map(_layer_of, self.tower), default=-1)
        return ModelShape({**self.config, "num_hidden_layers": last + 1}, {**self.tower})

    @cached_property
    def tells_packed(self) -> bool:
        """Whether the shapes are those of files with weights in 4 bits, which tell which ones are."""
        return any(isinstance(shape, PackedShape) for shape in self.tensors.values())

    @cached_property
    def blocks(self) -> list[Tensors]:
        """The tensors of each decoder block, by their names within it."""
        blocks: list[Tensors] = [{} for _ in range(self.layers)]
        for name, shape in self.tensors.items():
            # Layers beyond the last are those of multi-token prediction, which Transformers does not load.
            if 0 <= (index := _layer_of(name)) < self.layers:
                blocks[index][name.split(f".{index}.", 1)[1]] = shape
        return blocks

    @cached_property
    def places(self) -> list[str]:
        """The path of each decoder block, with a dot at its end; empty for one without tensors."""
        paths = {_layer_of(name): name[: found.end(1) + 1] for name in self.tensors if (found := _LAYER.search(name))}
        return [paths.get(index, "") for index in range(self.layers)]

    @cached_property
    def root(self) -> Tensors:
        """Embedding, head and final norm."""
        return {name: shape for name, shape in self.tensors.items() if _layer_of(name) < 0}

    @property
    def parameters(self) -> int:
        return count(self.root) + sum(map(count, self.blocks))

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        rows = [shape[0] for name, shape in self.root.items() if any(part in name for part in _EMBEDDINGS)]
        return rows[0] if rows else int(self.config["vocab_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def key_dim(self) -> int:
        """Channels of a query or key head. Multi-head latent attention joins a part with positions and one without."""
        if rope := self.config.get("qk_rope_head_dim"):
            return int(rope) + int(self.config.get("qk_nope_head_dim") or 0)
        return head_dim(self.config)

    @property
    def value_dim(self) -> int:
        return int(self.config.get("v_head_dim") or head_dim(self.config))

    @property
    def context(self) -> int | None:
        longest = self.config.get("max_position_embeddings")
        return int(longest) if longest else None


def _with_number(name: str, layers: Sequence[int]) -> str:
    """The name of a tensor of one of the `layers`, by its index among them."""
    found = _LAYER.search(name)
    return name if found is None else f"{name[: found.start(1)]}{layers.index(int(found[1]))}{name[found.end(1) :]}"


def count(tensors: Tensors) -> int:
    return sum(map(prod, tensors.values()))


def _stacked(tensors: Tensors) -> Tensors:
    """Join `experts.<j>.gate_proj.weight` and so on, of which a model may have tens of thousands."""
    stacked: Tensors = {}
    for name, shape in tensors.items():
        if found := _EXPERT.match(name):
            path = f"{found[1]}.{found[2]}"
            stacked[path] = (stacked.get(path, (0,))[0] + 1, *shape)
        else:
            stacked[name] = shape
    return stacked


def _layer_of(name: str) -> int:
    """Index of the decoder block that a tensor belongs to; -1 for the rest."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1
