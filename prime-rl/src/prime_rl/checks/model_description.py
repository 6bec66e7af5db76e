"""Describes a model from its `config.json`: its class, its language part, its towers, its kinds of layers, and why the
trainer or the embedded engine refuses it.

Start checks, estimate, trainer and engine ask the same description, so that none of them says yes where another says
no. `prime-rl/tests/models/test_description.py` compares it with docs/models.md, which compares trainer and engine with
Transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prime_rl.checks.adapters import ModulePaths
from prime_rl.configs.model import (
    ALL_LINEAR,
    STACKED_EXPERTS,
    LoRAConfig,
    ModelConfig,
    QuantizationConfig,
    matches,
    product_of,
)

OF_ROUTERS: Mapping[str, Any] = {
    "router_aux_loss_coef": 0.0,
    "router_bias_update_rate": 0.0,
    "freeze_moe_router": False,
}
"""Keys of `model` for the routers of a mixture, and what leaves these alone."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts in a layer of a mixture."""
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Keys of the number of experts that a token visits: of most families, Gemma 4, Hunyuan and Ernie 4.5."""

LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a model with several parts keeps the config of its language model."""

_TOWERS: Mapping[str, str] = {
    "vision": "images",
    "visual": "images",
    "vit": "images",
    "vq": "images",
    "audio": "sound",
    "speech": "sound",
    "codec": "sound",
}
"""Images or sound, by the first word of a part's key: `vision_config` is the config of a part that reads images."""

CAUSAL_FAMILIES = frozenset(
    "afmoe apertus arcee aria_text axk1 axk2 bamba bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet "
    "blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2 cohere2_moe cohere_compass_text cpmant "
    "ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 electra emu3 "
    "ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo fuyu gemma gemma2 gemma3 "
    "gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant "
    "gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo "
    "gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text jais2 "
    "jamba jetmoe kimi_linear laguna lfm2 lfm2_moe llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart "
    "megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral "
    "mixtral mllama modernbert-decoder moshi mpt musicgen musicgen_melody mvp nanochat nemotron nemotron_h olmo olmo2 "
    "olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet qwen2 "
    "qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text "
    "recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open "
    "stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba "
    "zamba2 zaya".split()
)
"""Model types of which Transformers has a causal language model. Asking Transformers takes seconds."""

SEPARABLE_FAMILIES = frozenset(
    "aya_vision cohere2_vision gemma3 gemma3n gemma4 glm4v got_ocr2 idefics3 internvl lfm2_vl lighton_ocr llama4 llava "
    "llava_next llava_onevision mistral3 mllama paligemma qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl "
    "qwen3_vl_moe smolvlm vipllava".split()
)
"""Model types with a vision tower whose language part, run alone as the causal class of its config, has the logits of
the whole on text. Tests compare them."""

PLAIN_LANGUAGE_PARTS: Mapping[str, str] = {
    "glm4v_text": "glm4",
    "mllama_text_model": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Language parts, and the model that they are on text: there, the three positions of multimodal rotary embeddings are
equal, and layers that attend to images are skipped."""

_FLAT_LANGUAGE_PARTS: Mapping[str, str] = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Model types whose `config.json` on the hub holds the language model's settings beside `vision_config`, and that of
their language part."""

VISION_FAMILIES = frozenset("gemma3 idefics3 qwen2_5_vl qwen3_vl smolvlm".split())
"""Model types that are trained on images: loss and gradients of packed rows equal Transformers' class. Tests compare
them."""

_LANGUAGE_MODELS = CAUSAL_FAMILIES | SEPARABLE_FAMILIES

UNTRAINED_FAMILIES = frozenset(
    # Their heads change the logits, or have no list of decoder blocks below them.
    "blt hrm_text inkling_text longcat_flash modernbert-decoder recurrent_gemma xlstm "
    # Drafts for the decoding of another model.
    "gemma4_assistant gemma4_unified_assistant "
    # Encoders, whose tokens see later ones.
    "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert reformer rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod "
    # Decoders of models with an encoder.
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus "
    "plbart prophetnet whisper".split()
)
"""Causal families that the trainer refuses; docs/models.md has the reasons."""

UNSCORED_FAMILIES = frozenset(
    "afmoe apertus aria_text bamba bitnet codegen cohere cohere2 cohere2_moe cwm dbrx deepseek_v32 "
    "deepseek_v4 dots1 emu3 ernie4_5 ernie4_5_moe exaone_moe falcon_h1 falcon_mamba flex_olmo fuyu gemma3n "
    "gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm4_moe glm4_moe_lite glm4v_text "
    "glm_moe_dsa got_ocr2 gpt_neox_japanese granite granite_swa granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared hy_v3 hy_v4 hyperclovax jais2 kimi_linear laguna lfm2 lfm2_moe llama4 llama4_text mamba "
    "mamba2 mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mllama mllama_text_model moshi nanochat nemotron_h "
    "olmo_hybrid olmoe phi4_multimodal qwen2_5_vl_text qwen2_vl_text qwen3_5_moe qwen3_5_moe_text qwen3_vl_moe_text "
    "qwen3_vl_text qwen4_exp qwen4_exp_text rwkv solar_open trocr vaultgemma xglm youtu zaya".split()
)
"""Families that are trained and of which Transformers has no class for sequence classification, as reward models and
critics have it."""

UNDIVIDED_FAMILIES = frozenset(
    "afmoe bamba biogpt bitnet bloom codegen ctrl deepseek_v4 diffllama falcon falcon_h1 falcon_mamba gpt2 gpt_bigcode "
    "gpt_neo gpt_neox_japanese gpt_oss gptj granitemoe granitemoehybrid granitemoeshared hunyuan_v1_dense "
    "hunyuan_v1_moe jamba jetmoe lfm2 lfm2_moe mamba mamba2 nemotron nemotron_h openai-gpt opt persimmon phimoe rwkv "
    "stablelm xglm".split()
)
"""Families that are trained and for whose layers Transformers has no plan of tensor parallelism."""

UNCHUNKED_FAMILIES = frozenset("biogpt ctrl falcon_mamba mamba mamba2 opt rwkv xglm".split())
"""Dense families that are trained and whose blocks have no MLP as a module that we know."""

_UNROUTED_FAMILIES = frozenset(("doge", "jetmoe", "llama4_text"))
"""Mixtures whose experts are no stack that takes hidden states and each token's experts, as `model.ep` divides it."""

_UNADAPTED_EXPERTS = frozenset(
    "gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared jetmoe llama4_text minimax minimax_m2 "
    "minimax_m3_vl_text mixtral nemotron_h phimoe".split()
)
"""Mixtures whose stacks of experts have biases, are transposed, or have other names on the hub than an adapter's."""
UNBIASED_FAMILIES = frozenset(
    "afmoe cohere2_moe deepseek_v2 doge ernie4_5_moe flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared hunyuan_v1_moe jamba jetmoe laguna llama4_text mellum minimax mixtral olmoe phimoe qwen2_moe "
    "qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text".split()
)
"""Mixtures that are trained and whose routers have no bias for the choice, or a frozen parameter."""
_BYPASSED_LAYERS: Mapping[str, str] = {
    "bloom": "dense|dense_4h_to_h",
    "gemma3n_text": "(correction|prediction)_coefs",
    "jamba": "dt_proj",
    **dict.fromkeys(("falcon_mamba", "mamba"), "dt_proj|out_proj|x_proj"),
}
"""Linear layers whose weights the code of a family reads without calling them, by a regular expression."""
_OTHER_MATRICES: Mapping[str, str] = dict.fromkeys(("falcon", "gpt2", "openai-gpt"), "(?!lm_head$).+")
"""Matrices that are no linear layers of PyTorch, by a regular expression for the layer."""
_ROUTER = re.compile(r"(?<!\brouter)\.(gate|router)$")
_EMBEDDING = r"embed_(?!out$)\w+|w|w[tp]e|\w*embeddings?"
_RENAMED_MODULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), ((r"\bblock_sparse_moe\b", "mlp"),)),
    "phimoe": ((r"\bblock_sparse_moe\.gate$", "mlp.router"), (r"\bblock_sparse_moe\b", "mlp")),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        ((r"(?<=block_sparse_moe)\.(in|out)put_linear$", ".experts"), (r"\.layer$", "")),
    ),
    "olmo_hybrid": (
        (r"\battention_layer_norm$", "input_layernorm"),
        (r"\bfeedforward_layer_norm$", "post_attention_layernorm"),
        (r"\b[qkv]_conv1d$", "conv1d"),
    ),
}
"""Modules that have other names on the hub than in their class, as regular expressions and what replaces them."""
_HEADS = ("lm_head", "embed_out", "output_projection", "head", "score")
"""Names of heads. One that shares its weight with the embedding, or is a reward model's, is not in the files."""
_BASES = ("model", "transformer", "backbone")
_IN_EXPERT = re.compile(r"(?<=\.experts)\.\d+\b.*")
_LAYER = re.compile(r"(?<=\blayers\.)\d+")
RENAMED_LAYERS = frozenset("deepseek_v4 hy_v3 hy_v4 laguna nemotron_h".split())
"""Families whose linear layers have other names on the hub than in their class, which adapters are named by."""

_OWN_ATTENTION = frozenset(
    "biogpt bloom codegen falcon gpt_neo gpt_neox_japanese gptj mpt nemotron openai-gpt rwkv stablelm xglm "
    "xlstm".split()
)
"""Families whose attention is in their own code, where the embedded engine cannot put its key-value cache."""
_OTHER_ATTENTION = frozenset("diffllama hrm_text kimi_linear minimax recurrent_gemma zamba zamba2".split())
"""Families with differences of attentions, or layers without keys and values that are not among the slots'."""
_HYBRIDS: Mapping[str, str] = {
    "falcon_h1": "hybrid",
    "llama4_text": "chunked_attention",
    **dict.fromkeys(
        "bamba falcon_mamba jamba kimi_linear mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text "
        "qwen3_5_text qwen3_next qwen4_exp_text zamba zamba2".split(),
        "linear_attention",
    ),
}
"""The kind of layer that a family has besides attention, for configs without `layer_types`."""

_STATE_HEADS: Mapping[str, str] = {
    "qwen3_next": "linear_num_key_heads",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "linear_num_value_heads"),
    **dict.fromkeys(("bamba", "granitemoehybrid"), "mamba_n_heads"),
    "nemotron_h": "mamba_num_heads",
    **dict.fromkeys(("lfm2", "lfm2_moe"), "hidden_size"),
}
"""Keys of the number of heads or channels that `model.cp` divides in layers that carry a state, by the family
(`trainer/model/hybrids.py`). Those of other families run on whole rows in every process."""

DECODED_LAYERS = frozenset(("full_attention", "sliding_attention"))
"""Kinds of layers that the embedded engine decodes."""
STATE_LAYERS = frozenset(("linear_attention", "conv", "hybrid", "mlp", "moe"))
"""Further kinds of the hybrid models that it decodes."""

_PLAIN_VERSION = "name its version in bfloat16 or float32"
_LIST = "docs/models.md lists the models that can be trained"


@dataclass(frozen=True)
class ModelDescription:
    """A model as its `config.json` describes it."""

    config: Mapping[str, Any]
    """The whole `config.json`."""

    @property
    def family(self) -> str:
        """Its `model_type`; empty if it states none."""
        return str(self.config.get("model_type") or "")

    @property
    def class_name(self) -> str:
        """The class that the checkpoint names, or its family."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else f"a model of type {self.family!r}"

    @cached_property
    def language_part(self) -> Mapping[str, Any]:
        """The config of the language model: the whole, or the part that holds it."""
        for key in LANGUAGE_PARTS:
            part = self.config.get(key)
            if isinstance(part, Mapping):
                return ModelDescription(part).language_part
        flat = _FLAT_LANGUAGE_PARTS.get(self.family)
        if flat is not None and "vision_config" in self.config:
            beside = {key: value for key, value in self.config.items() if not _reads(key) and key != "architectures"}
            return beside | {"model_type": flat}
        return self.config

    @property
    def is_nested(self) -> bool:
        """Whether the language model is one part of several."""
        return self.language_part is not self.config

    @cached_property
    def towers(self) -> tuple[str, ...]:
        """Keys of the parts beside the language model, as `vision_config`."""
        return tuple(
            key
            for key, part in self.config.items()
            if isinstance(part, Mapping) and part and _reads(key) and key not in LANGUAGE_PARTS
        )

    def setting(self, key: str) -> Any:
        """A value of the whole or, if it has none there, of the language part."""
        return self.config.get(key) or self.language_part.get(key)

    @property
    def layer_kinds(self) -> frozenset[str]:
        """Kinds of its layers by Transformers' names; empty if it states none."""
        text = self.language_part
        stated = text.get("layer_types")
        if isinstance(stated, list) and stated:
            return frozenset(map(str, stated))
        # LFM2 before Transformers 5.
        if isinstance(attending := text.get("full_attn_idxs"), list):
            layers = text.get("num_hidden_layers")
            return frozenset(("full_attention",) if len(attending) == layers else ("full_attention", "conv"))
        other = _HYBRIDS.get(str(text.get("model_type")))
        return frozenset((other,) if other else ())

    @property
    def layers_on_text(self) -> tuple[int, ...] | None:
        """The numbers of the layers that run on text; None if all do. Mllama has others, which attend to images."""
        count, skipped = (self.language_part.get(key) for key in ("num_hidden_layers", "cross_attention_layers"))
        if not isinstance(skipped, list) or not isinstance(count, int):
            return None
        return tuple(index for index in range(count) if index not in skipped)

    def training_fault(self, seq_len: int | None = None, trusts_code: bool = False) -> str | None:
        """Why the trainer refuses the model; None if nothing in its config says so.

        `seq_len` is the run's longest sequence. A model's own code is judged when it is loaded.
        """
        if fault := self.parts_fault():
            return fault
        if self._brings_code:
            return None if trusts_code else f"{self.class_name} comes with code: set trust_remote_code = true to run it"
        if self.family and self.family not in _LANGUAGE_MODELS:
            return f"Transformers has no causal language model of type {self.family!r}; {_LIST}"
        part = ModelDescription(self.language_part)
        is_other = self.is_nested and part.family not in PLAIN_LANGUAGE_PARTS
        if is_other and (fault := part.training_fault(seq_len)):
            return fault
        if self.family in UNTRAINED_FAMILIES or self._changes_with_length(seq_len):
            long = f" for sequences of {seq_len} tokens" if self._changes_with_length(seq_len) else ""
            return f"models of type {self.family!r} cannot be trained{long}; {_LIST}"
        return None

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        counts = map(self.setting, EXPERT_COUNTS)
        return any(isinstance(count, list) or (isinstance(count, int) and count > 1) for count in counts)

    @property
    def experts_per_token(self) -> int:
        """How many experts of a layer a token visits; 1 of a dense model."""
        return _largest(map(self.setting, _EXPERTS_PER_TOKEN))

    @property
    def visited_share(self) -> float:
        """The share of a layer's experts that a token visits."""
        return self.experts_per_token / _largest(map(self.setting, EXPERT_COUNTS))

    def routers_fault(self, model: ModelConfig) -> str | None:
        """Why its routers cannot be trained as the `model` section says; None if nothing in its config says so."""
        key = next((each for each in OF_ROUTERS if getattr(model, each)), None)
        if key is not None and not self.has_experts:
            return f"model.{key}: {self.class_name} is no mixture of experts: remove it"
        family = str(self.language_part.get("model_type"))
        if model.router_bias_update_rate > 0 and PLAIN_LANGUAGE_PARTS.get(family, family) in UNBIASED_FAMILIES:
            return (
                f"model.router_bias_update_rate: the routers of {self.class_name} have no bias that could be moved: "
                "remove it; model.router_aux_loss_coef balances by a loss"
            )
        return None

    @property
    def enlarging_fault(self) -> str | None:
        """Why it cannot have more embeddings; None if nothing in its config says so."""
        if self.setting("vocab_size_per_layer_input") is not None:
            return f"models of type {self.family!r} have embeddings in each layer too"
        if self.layers_on_text is not None:
            return f"models of type {self.family!r} have embeddings of images behind those of tokens"
        return None

    def scoring_fault(self) -> str | None:
        """Why the model cannot be a reward model or a critic; None if nothing in its config says so."""
        if self.has_known_language_part:
            return "a reward model of a checkpoint with several parts is not supported"
        if self.family in UNSCORED_FAMILIES:
            return f"Transformers has no class for a reward model of the type {self.family!r}"
        if not self.class_name.endswith("ForSequenceClassification"):
            return None
        labels = len(self.config.get("id2label") or (0, 1))  # without an entry, there are Transformers' two
        return None if labels == 1 else f"a classifier with {labels} labels, and a reward model has one"

    @property
    def attention_heads(self) -> Any:
        """Their number, as the config has it; None if it does not say."""
        return next(filter(None, map(self.setting, ("num_attention_heads", "n_head", "num_heads", "n_heads"))), None)

    def serving_fault(self, tp: int) -> str | None:
        """Why vLLM cannot serve it on `tp` GPUs; None if nothing in this config says so."""
        if self.layers_on_text is not None:
            return f'vLLM has no {self.class_name} since 0.11: set inference.backend = "embedded"'
        heads, kv_heads = self.attention_heads, self.setting("num_key_value_heads")
        if isinstance(heads, int) and heads % tp:
            return f"parallel.tp = {tp} does not divide the {heads} attention heads of {self.class_name}"
        if isinstance(kv_heads, int) and kv_heads and kv_heads % tp and tp % kv_heads:
            return f"parallel.tp = {tp} neither divides nor repeats the {kv_heads} key-value heads of {self.class_name}"
        return None

    def division_fault(self, model: ModelConfig) -> str | None:
        """Why it cannot be divided among processes or into chunks as the `model` section says; None if nothing in this
        config says so.
        """
        family = self.language_part.get("model_type")
        if model.mlp_chunk_tokens is not None and (self.has_experts or family in UNCHUNKED_FAMILIES):
            what = "is a mixture of experts" if self.has_experts else "has no MLP that can be chunked"
            return f"model.mlp_chunk_tokens: {self.class_name} {what}: remove it"
        heads = self.attention_heads
        sharing, text = product_of(model, "cp", "tp")
        if isinstance(heads, int) and heads % sharing:
            return f"{text} does not divide the {heads} attention heads of {self.class_name}"
        if model.ep > 1 and not any("expert" in key or "moe" in key for key in (*self.config, *self.language_part)):
            return f"model.ep = {model.ep} divides experts, and {self.class_name} has none"
        if model.ep > 1 and family in _UNROUTED_FAMILIES:
            return f"model.ep: {self.class_name} has no experts that can be divided: remove model.ep"
        if model.tp > 1 and family in UNDIVIDED_FAMILIES:
            return f"model.tp: Transformers has no plan to divide the layers of {self.class_name}: remove model.tp"
        experts = next((count for key in EXPERT_COUNTS if isinstance(count := self.setting(key), int)), None)
        dividing, text = product_of(model, "ep" if model.ep > 1 else "tp")
        if experts is not None and experts > 1 and experts % dividing:
            return f"{text} does not divide the {experts} experts of {self.class_name}"
        # Context parallelism repeats key-value heads where there are fewer.
        heads = self.setting("num_key_value_heads")
        if isinstance(heads, int) and heads % model.tp:
            return f"model.tp = {model.tp} does not divide the {heads} key-value heads of {self.class_name}"
        # Experts are held whole.
        is_dense = not self.has_experts or self.setting("first_k_dense_replace") or self.setting("mlp_only_layers")
        for key in (*(("intermediate_size",) if is_dense else ()), "shared_expert_intermediate_size"):
            stated = self.setting(key)
            for width in stated if isinstance(stated, list) else [stated]:
                if isinstance(width, int) and width % model.tp:
                    return f"model.tp = {model.tp} does not divide {key} = {width} of {self.class_name}"
        return None

    def computes_whole_rows(self, cp: int) -> bool:
        """Whether some of its layers run on a whole row in each of the `cp` processes that divide it."""
        if not self.layer_kinds & STATE_LAYERS:
            return False
        heads = self.setting(_STATE_HEADS.get(str(self.language_part.get("model_type")), ""))
        return not isinstance(heads, int) or heads % cp > 0

    def dropout_fault(self, model: ModelConfig) -> str | None:
        """Why SFT cannot apply the dropouts of its config in layers that processes divide; None if it can.

        The processes draw the same numbers, so that they drop alike what they all hold: of what each holds a part of,
        such as the scores of some heads, they would drop the same places.
        """
        key = next(filter(self.setting, ("attention_dropout", "attn_pdrop", "activation_dropout")), None)
        if model.tp == 1 or key is None:
            return None
        return (
            f"model.tp = {model.tp} and {key} = {self.setting(key)}: set that to 0 in config.json, or remove model.tp"
        )

    @property
    def packed(self) -> QuantizationConfig | None:
        """How its files hold the weights of linear layers, if they do so in 4 bits as bitsandbytes does."""
        settings = self.setting("quantization_config")
        if not isinstance(settings, Mapping) or quantization_fault(settings):
            return None
        return QuantizationConfig(type="nf4", double=bool(settings.get("bnb_4bit_use_double_quant")))

    def storing_fault(self, model: ModelConfig, *, is_frozen: bool = False) -> str | None:
        """Why its weights cannot be stored in 4 bits, as `model.quantization` says or as they come; None if nothing in
        this config says so. `is_frozen`: nothing of it is trained.
        """
        packed = self.packed
        if packed is None:
            if model.quantization is None or not self.has_experts:
                return None
            return f"model.quantization does not cover the experts of {self.class_name}, most of its weights: remove it"
        if model.quantization is not None:
            is_loftq = model.lora is not None and model.lora.init == "loftq"
            return f"its weights are in 4 bits already: remove model.quantization{' and lora.init' if is_loftq else ''}"
        if self.has_experts:
            return f"its weights are in 4 bits, which is not supported for experts: {_PLAIN_VERSION}"
        if self.is_nested and model.vision is None:
            advice = f"set [model.vision], or {_PLAIN_VERSION}" if self.family in VISION_FAMILIES else _PLAIN_VERSION
            return f"its weights are in 4 bits, which is not supported for its language part alone: {advice}"
        stored = model.model_copy(
            update={"quantization": packed, "lora": model.lora or (LoRAConfig() if is_frozen else None)}
        )
        fault = next(stored.quantization_faults(), None)
        if fault is None and stored.lora is not None and stored.lora.init == "pissa":
            fault = "does not go with lora.init = 'pissa', which needs the weights as numbers: remove init"
        return None if fault is None else f"its weights are in 4 bits, and quantization {fault}; or {_PLAIN_VERSION}"

    def adapter_fault(
        self, lora: LoRAConfig | None, tensors: Mapping[str, Sequence[int]] | None = None, *, has_images: bool = False
    ) -> str | None:
        """Why the layers of the model cannot be adapted like this; None if nothing in its config says so, nor in
        `tensors`, the shapes in its files. `has_images`: its tower is loaded too.
        """
        if lora is None:
            return None
        family = self.language_part.get("model_type")
        paths = self._module_paths(tensors or {}, has_images=has_images)
        is_named = STACKED_EXPERTS in lora.target_modules and STACKED_EXPERTS not in lora.modules_to_save
        has_stacks = self.has_experts and family != "doge"  # which has no layer of that name
        if bool(paths.adapted_stacks(lora)) if paths else is_named and has_stacks:
            key = "lora.use_dora" if lora.use_dora else "lora.init = 'pissa'" if lora.init == "pissa" else None
            if key is None and family in _UNADAPTED_EXPERTS:
                key = "lora.target_modules: an adapter"
            if key is not None:
                return (
                    f"{key} is not for the experts of {self.class_name}: remove {STACKED_EXPERTS!r} from "
                    "lora.target_modules"
                )
        if paths is None:
            return None
        named = [pattern for pattern in lora.target_modules if pattern != ALL_LINEAR and matches(pattern, "lm_head")]
        if named and "lm_head" not in {*paths.linear, *paths.saved(lora)}:
            return (
                "lora.target_modules: lm_head shares its weight with the embedding, so it cannot be adapted alone; "
                'to train both, set lora.modules_to_save = ["lm_head"] and remove it from target_modules'
            )
        return paths.fault(lora)

    def _module_paths(self, tensors: Mapping[str, Sequence[int]], *, has_images: bool) -> ModulePaths | None:
        """The modules that adapters can name, by the names and shapes in its files; None if these do not tell."""
        family = str(self.language_part.get("model_type"))
        if self._brings_code or family in RENAMED_LAYERS:
            return None
        start = language_start(tensors) if self.is_nested and not has_images else None
        start = start and start.replace("language_model.model.", "language_model.")
        places = {name: self._place(name, start) for name in tensors}
        in_blocks = [place for place in places.values() if place and any(map(str.isdigit, place.split(".")))]
        if len(in_blocks) < 2:  # no decoder block that is known
            return None
        # Files of a model without a head leave out where its class holds the blocks.
        bases = () if in_blocks[0].split(".")[0] in (*_BASES, family) else (*_BASES, family)
        other = re.compile(rf"{_EMBEDDING}|{_OTHER_MATRICES.get(family, '(?!)')}")
        read = re.compile(_BYPASSED_LAYERS.get(family, "(?!)"))
        weighted, linear, stacks, bypassed = set(_HEADS), set[str](), set[str](), set[str]()
        for name, place in places.items():
            if place is None:
                continue
            shape, outside = tensors[name], _IN_EXPERT.sub("", place)
            is_stacked = outside != place or (len(shape) == 3 and 1 not in shape)
            leaf = place.rpartition(".")[2]
            is_router = self.has_experts and family != "jamba" and _ROUTER.search(place)
            is_matrix = len(shape) == 2 and name.endswith(".weight")
            is_linear = is_matrix and not is_router and not other.fullmatch(leaf)
            for each in (outside, *(f"{base}.{outside}" for base in bases if outside not in _HEADS)):
                weighted.add(each)
                if is_stacked:
                    stacks.add(each)
                elif is_linear:
                    linear.add(each)
                    if read.fullmatch(leaf):
                        bypassed.add(each)
        if "embed_out" in linear:
            linear.add("lm_head")  # as the class of GPT-NeoX names it
        return ModulePaths(weighted, linear, linear.difference(_HEADS, bypassed), stacks, bypassed)

    def _place(self, tensor: str, start: str | None) -> str | None:
        """The path of the module that has a tensor of the files. `start` precedes the layers of a language model that
        is loaded without the other parts, by the names of its own class; None if it is not loaded.
        """
        place = tensor.rpartition(".")[0].replace("language_model.model.", "language_model.")
        for held, own in _RENAMED_MODULES.get(str(self.language_part.get("model_type")), ()):
            place = re.sub(held, own, place)
        if start is None:
            return place
        if place.endswith("lm_head"):
            return "lm_head"
        if not place.startswith(start):
            return None
        place = f"model.{place.removeprefix(start)}"
        layer = _LAYER.search(place)
        if layer is None or self.layers_on_text is None:
            return place
        on_text = list(map(str, self.layers_on_text))
        return _LAYER.sub(str(on_text.index(layer[0])), place) if layer[0] in on_text else None

    def parts_fault(self) -> str | None:
        """Why the trainer refuses the model's weights or parts, which it does not find out by computing with them."""
        if fault := quantization_fault(self.setting("quantization_config")):
            return fault
        if (self.is_nested or self.towers) and not self.has_known_language_part:
            read = " and ".join(dict.fromkeys(_reads(key) for key in self.towers)) or "more than text"
            return f"{self.class_name} reads {read}, which is not supported yet: name a model for text alone"
        return None

    @property
    def has_known_language_part(self) -> bool:
        """Whether the language model is one part of several and runs alone as it does in the whole."""
        return self.is_nested and self.family in SEPARABLE_FAMILIES and "vision_config" in self.config

    def embedded_fault(self, max_model_len: int | None = None) -> str | None:
        """Why the embedded engine refuses the model; None if nothing in its config says so."""
        found = self._embedded_reason(max_model_len)
        return f'the embedded engine does not run {found}: set backend = "vllm"' if found else None

    def _embedded_reason(self, max_model_len: int | None) -> str | None:
        text, family = self.language_part, str(self.language_part.get("model_type") or "")
        if (self.is_nested or self.towers) and not self.has_known_language_part:
            return f"{self.class_name}, which reads {_reads(self.towers[0]) if self.towers else 'more than text'}"
        if self._brings_code:
            return None
        if self.family and self.family not in _LANGUAGE_MODELS:
            return f"models of type {self.family!r}, which are no causal language models in Transformers"
        if others := self.layer_kinds - DECODED_LAYERS - STATE_LAYERS:
            return f"layers of type {', '.join(sorted(others))}"
        # Transformers applies a least time step when it reads a prompt, and not when it decodes.
        least_step = (
            text.get("time_step_min", 0.001) if family == "nemotron_h" else (text.get("time_step_limit") or [0])[0]
        )
        if least_step > 0:
            return f"models of type {family!r} with a least time step ({least_step:g})"
        of_layers = text.get("vocab_size_per_layer_input")
        if of_layers is not None and of_layers < (text.get("vocab_size") or of_layers):
            return f"models of type {family!r} whose layers have no embeddings for some of the tokens that they sample"
        if family in _OWN_ATTENTION | _OTHER_ATTENTION or self._changes_with_length(max_model_len):
            return f"models of type {family!r} with these settings, which have an attention of their own"
        return None

    @property
    def _brings_code(self) -> bool:
        """Whether only the model's own code can build it."""
        return self.family not in CAUSAL_FAMILIES and bool(self.config.get("auto_map"))

    def _changes_with_length(self, longest: int | None) -> bool:
        """Phi-MoE scales its attention by the longest position of a batch, and so by a sequence's neighbours."""
        if self.family != "phimoe":
            return False
        rope = self.setting("rope_parameters") or self.setting("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type")
        original = rope.get("original_max_position_embeddings") or self.setting("original_max_position_embeddings")
        return kind == "longrope" and bool(original) and (longest or self.setting("max_position_embeddings")) > original


def _largest(counts: Iterable[Any]) -> int:
    """The first number; where it has one for each layer, the largest."""
    found = next((count for count in counts if count), 1)
    return int(max(found) if isinstance(found, list) else found)


def vision_fault(family: str) -> str | None:
    """Why models of a type are not trained on images; None if they are."""
    if family in VISION_FAMILIES:
        return None
    return f"[model.vision] trains {', '.join(sorted(VISION_FAMILIES))} on images, not models of type {family!r}"


def quantization_fault(settings: Any) -> str | None:
    """Why a model with this `quantization_config` cannot be trained; None if it has none, or is in 4 bits as
    bitsandbytes stores them.
    """
    if not settings:
        return None
    given = settings if isinstance(settings, Mapping) else {}
    method = given.get("quant_method") or ("bitsandbytes" if given.get("load_in_4bit") else None)
    if method == "bitsandbytes" and given.get("load_in_4bit"):
        return None
    bits = " in 8 bits" if method == "bitsandbytes" else ""
    how = f" ({method}{bits})" if method else ""
    return (
        f"its weights are quantized{how}, and training reads only bitsandbytes' 4 bits: {_PLAIN_VERSION}, which "
        '[model.lora] with model.quantization = "nf4" stores in 4 bits too'
    )


def is_of_tower(tensor: str) -> bool:
    """Whether a tensor of a checkpoint belongs to a tower, as `model.vision_tower.post_layernorm.bias`."""
    return any(part.startswith(word) for part in tensor.split(".") for word in _TOWERS)


def language_start(tensors: Iterable[str]) -> str | None:
    """The part before `layers.` in the names of a language model's tensors; None for a checkpoint without a tower."""
    names = list(tensors)
    if not any(map(is_of_tower, names)):
        return None
    return next((name[: name.index("layers.0.")] for name in names if _is_in_first_layer(name)), None)


def _is_in_first_layer(name: str) -> bool:
    return ".layers.0." in name and not is_of_tower(name)


def _reads(key: str) -> str:
    """Images or sound, for the key of a tower's config; empty for any other key."""
    return next((what for word, what in _TOWERS.items() if key.startswith(word) and "config" in key), "")
