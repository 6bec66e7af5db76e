"""Builds the model to train (a Transformers model sharded with FSDP2), checks it, and loads its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    dynamic_module_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from prime_rl.checks.memory.shapes import ModelShape, with_usual_names
from prime_rl.checks.model_description import ModelDescription, is_of_tower, vision_fault
from prime_rl.checks.model_files import unused_tensors
from prime_rl.configs.trainer import ModelConfig, WeightCheckpointConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.kernels.attention import (
    EAGER,
    FLEX,
    SDPA,
    choose_attention,
    divide_kernel,
    reads_attention_functions,
)
from prime_rl.trainer.kernels.lean_layers import use_lean_mlps, use_lean_norms
from prime_rl.trainer.kernels.product_choice import ProductChoice
from prime_rl.trainer.kernels.products import Products, use_lean_linears
from prime_rl.trainer.model.blocks import decoder_blocks, prepare_blocks
from prime_rl.trainer.model.expert_parallel import divide_experts, shard_experts
from prime_rl.trainer.model.hybrids import StateLayers
from prime_rl.trainer.model.layouts import SHARED, Grid, PrefixTree, SequenceBlocks
from prime_rl.trainer.model.lora import (
    Merge,
    add_adapters,
    draw_adapters,
    frozen_names,
    load_adapter,
    log_adapters,
)
from prime_rl.trainer.model.quantized import keep_quantized, log_quantization, quantize_layers
from prime_rl.trainer.model.scoring import Layout, enable_scoring, output_head, score_tokens, scoring_of
from prime_rl.trainer.model.tensor_parallel import divide_layers
from prime_rl.trainer.model.tokenizer import load_error, loading_code
from prime_rl.trainer.model.vision import attach_vision
from prime_rl.trainer.optim.optimizer import keep_gradients
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.transport.images import FAMILIES
from prime_rl.transport.language_part import PROCESSOR_FILES, attach, language_config, part_of
from prime_rl.transport.loading import (
    Stored,
    compute_buffers,
    fill,
    find_weights,
    float32_names,
    has_score,
    local,
    put_own,
    spread,
    unchanged,
)
from prime_rl.transport.packed import Packed
from prime_rl.transport.routing import Routers
from prime_rl.utils.errors import StartFault, first_line
from prime_rl.utils.logger import get_logger
from prime_rl.utils.model_lengths import fix_rotary_lengths, ids_read, tightened

# The check at the start of a run: packed rows must have the results of plain Transformers.


_PROBES = (range(12), range(20, 27), (*range(6), 30, 31))
"""Sequences that every model is checked with, as indices of `_token`. They are longer than a `tightened` window. The
first and the last share a prefix."""

_EXACT, _ROUNDED = 1e-4, 0.25
"""Largest norm of a difference between logits, relative to their norm: in float32 on a CPU, and in bfloat16 or TF32.
With SmolLM2-135M, two attention kernels differ by 1e-6 in float32 and by 0.02 in bfloat16, where rounding can also send
a token to another expert. Ignoring a window makes a difference of 0.7."""


def _token(index: int, vocab_size: int) -> int:
    """A token id, spread over the vocabulary: after special tokens, which come first, bfloat16 is far less exact."""
    return (4321 + 7919 * index) % vocab_size


class Probe(NamedTuple):
    """A token sequence and the model's own logits for it."""

    tokens: Sequence[int]
    logits_TV: Tensor


def check_scoring(model: PreTrainedModel, device: torch.device, seq_len: int, optional: Sequence[type[Layout]]) -> None:
    """Check `score_tokens` against the model's own logits, computed with eager attention. Collective.

    Each of the `optional` layouts is used from then on if it gives the same logits. The model must be without dropout,
    which means in evaluation mode if it has any.

    Raises:
        ModelError: `score_tokens` gives other logits than the model, so losses would be wrong.
    """
    name, kernel = type(model).__name__.removeprefix("FSDP"), model.config._attn_implementation
    advice = ", which is not supported" if kernel in (SDPA, EAGER) else ": set model.attn = 'sdpa'"
    if model.base_model is model:
        raise ModelError(f"{name} does not separate its layers from its head, which is not supported")
    # Compiled blocks run as written: the check's few shapes are not worth a compilation each.
    with (
        torch.no_grad(),
        _telling_head(model),
        _resharding(model, device),
        torch.compiler.set_stance("force_eager"),
        tightened(model),
    ):
        try:
            expected = _model_logits(model, device, EAGER if model._supports_attention_backend else kernel)
        except RuntimeError as error:
            if scoring_of(model).tp is None or isinstance(error, torch.OutOfMemoryError):
                raise
            # Its code counts with all heads, for example.
            raise ModelError(f"model.tp: {name} does not run with divided layers: {first_line(error)}") from error
        if not all(bool(logits.isfinite().all()) for logits in expected):
            raise ModelError(f"{name} has logits that are not finite: its weights, or those of the checkpoint, are bad")
        long, other, alike = (Probe(*of_one) for of_one in zip(_probes(model), expected, strict=True))
        far = _last_position(model, seq_len)
        if scoring_of(model).context is not None:
            _check_divided(model, device, [other, long, alike], far, optional)
            return
        # Almost every model passes here. Otherwise, the steps in between show what differs.
        if not all(_match(model, device, [other, long], far)):
            own = _model_logits(model, device, kernel)
            if not all(_is_close(logits, wanted) for logits, wanted in zip(own, expected, strict=True)):
                raise ModelError(f"{name} has other logits with {kernel} than with eager attention{advice}")
            if not all(_match(model, device, [long])):
                raise ModelError(f"{name} modifies its logits after the head, which is not supported")
            # What remains is that sequences of a row are not isolated. Each may need a row of the grid for itself.
            scoring_of(model).shares_rows = False
            if kernel not in (SDPA, EAGER) or not all(_match(model, device, [other, long], far)):
                raise ModelError(f"{name} lets sequences of a packed row influence each other{advice}")
        if kernel == SDPA and model._supports_attention_backend:
            _choose_layouts(model, device, [long, alike], optional)


def _check_divided(
    model: PreTrainedModel, device: torch.device, probes: Sequence[Probe], far: int, layouts: Sequence[type[Layout]]
) -> None:
    """Check rows that processes divide, in the one of the `layouts` that all rows will have. Collective."""
    name, kernel = type(model).__name__.removeprefix("FSDP"), model.config._attn_implementation
    if not reads_attention_functions(model):
        raise ModelError(f"model.cp: {name} has its own attention code, which cannot be divided")
    if kernel == FLEX:
        raise ModelError(f"model.cp: {name} runs with flex attention here, whose mask cannot be divided")
    if kernel in (SDPA, EAGER):
        model.config._attn_implementation = SHARED
        scoring_of(model).layouts = layouts
    if not all(_match(model, device, probes, far)):
        raise ModelError(f"model.cp: {name} has other logits if its rows are divided, which is not supported")


def _choose_layouts(
    model: PreTrainedModel, device: torch.device, probes: Sequence[Probe], optional: Sequence[type[Layout]]
) -> None:
    """Enable those of the `optional` layouts that give the model's own logits. They only save time."""
    scoring = scoring_of(model)
    model.config._attn_implementation = SHARED
    equal: list[type[Layout]] = []
    for layout in optional:
        scoring.layouts = (layout,)
        with suppress(ModelError):  # the layout does not support the model's attention
            equal += [layout] if all(_match(model, device, probes)) else []
    scoring.layouts = (Grid, *equal)
    if not equal:
        model.config._attn_implementation = SDPA


def _probes(model: PreTrainedModel) -> list[list[int]]:
    count = ids_read(model.config.get_text_config())
    return [[_token(index, count) for index in indices] for indices in _PROBES]


def _model_logits(model: PreTrainedModel, device: torch.device, kernel: str) -> list[Tensor]:
    """The model's own logits for each probe, with the attention `kernel`. Collective."""
    sequences = [torch.tensor(tokens, device=device) for tokens in _probes(model)]
    before = model.config._attn_implementation
    model.config._attn_implementation = kernel
    try:
        # One forward pass for all: causal attention hides the padding of the shorter sequences. `Grid` pads with
        # another token than 0, so that a model that sees later tokens does not agree with itself.
        logits_NTV = _all_logits(model, pad_sequence(sequences, batch_first=True))
    finally:
        model.config._attn_implementation = before
    return [logits_TV[: len(tokens)] for logits_TV, tokens in zip(logits_NTV, sequences, strict=True)]


def _all_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The model's own logits of every token. A reward model returns those of the last ones; its head computes all."""
    if not has_score(model):
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
        return logits
    kept: list[Tensor] = []
    hook = output_head(model).register_forward_hook(lambda module, inputs, output: kept.append(output))
    try:
        # One sequence at a time: without a padding token, the model takes no more.
        for sequence in input_ids:
            model(input_ids=sequence[None], use_cache=False)
    finally:
        hook.remove()
    return torch.cat(kept)


def _match(
    model: nn.Module, device: torch.device, probes: Sequence[Probe], far_position: int | None = None
) -> list[bool]:
    """For each probe, whether `score_tokens` on one packed row of all probes gives its own logits. Collective.

    With `far_position`, the row ends with one token at that position, as of a long neighbour.
    """
    tokens = [token for probe in probes for token in probe.tokens]
    positions = [position for probe in probes for position in range(len(probe.tokens))]
    lengths = [len(probe.tokens) for probe in probes]
    if far_position is not None:
        tokens, positions, lengths = [*tokens, 1], [*positions, far_position], [*lengths, 1]
    tokens_1T, positions_1T = (torch.tensor(values, device=device)[None] for values in (tokens, positions))
    scored = score_tokens(model, tokens_1T, positions_1T, lambda hidden, logits_of: logits_of(hidden))
    of_probes = scored.split(lengths)[: len(probes)]
    return [_is_close(logits, probe.logits_TV) for logits, probe in zip(of_probes, probes, strict=True)]


def _last_position(model: PreTrainedModel, seq_len: int) -> int:
    """The largest position of the run. Learned position embeddings end at the model's context length."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or seq_len
    return max(1, min(seq_len, longest) - 1)


def _is_close(ours: Tensor, own: Tensor) -> bool:
    tolerance = _EXACT if own.dtype == torch.float32 and own.device.type == "cpu" else _ROUNDED
    return bool((ours.float() - own.float()).norm() <= tolerance * own.float().norm())


@contextmanager
def _telling_head(model: PreTrainedModel) -> Iterator[None]:
    """Give a reward model's head of zeros other values in the block: all logits would be 0, however they are computed.

    A critic that was stopped before the first update of its head comes back with one.
    """
    head = list(output_head(model).parameters()) if has_score(model) else []
    blank = [own for each in head if not (own := local(each)).any()]
    for own in blank:
        own.copy_(torch.linspace(-1, 1, own.numel()).view(own.shape))
    try:
        yield
    finally:
        for own in blank:
            own.zero_()


@contextmanager
def _resharding(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Reshard the model's weights after the block.

    A single process on a CPU holds all weights anyway, so it keeps them gathered between forward passes.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    is_kept = dist.get_world_size() == 1 and device.type == "cpu"
    blocks = [block for block in decoder_blocks(model) if isinstance(block, FSDPModule)] if is_kept else []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        # Without a backward pass, parameters stay gathered, and an optimizer created now would reference those.
        for unit in units:
            unit.reshard()


def own_class(model: nn.Module) -> type | None:
    """The class that a model brought with it; None for those of Transformers."""
    return next((each for each in type(model).__mro__ if each.__module__.startswith("transformers_modules.")), None)


def load_model_class(model_config: PretrainedConfig, name: str) -> None:
    """Load the class of the model at `name`, if its config names one of the model's own. It stays loaded."""
    reference = (getattr(model_config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None:
        dynamic_module_utils.get_class_from_dynamic_module(reference, name)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RANDOM_INIT_SEED = 0
_DROPOUT_SEED = 0
_Options = ParamSpec("_Options")


def setup_frozen(
    config: ModelConfig, mesh: Mesh, products: ProductChoice | None = None, *, name: str | None = None
) -> PreTrainedModel:
    """Build a model that is never updated, beside the trained one of `config`. Collective.

    It is stored in the compute dtype, without gradients. `name`: another model than the trained one; it has its own
    weights alone.
    """
    dtype = str(compute_dtype(config, mesh.process.device)).removeprefix("torch.")
    changes: dict[str, Any] = {"optimization_dtype": dtype, "optim_cpu_offload": False}
    if name is not None:
        changes |= {"name": name, "adapter": None, "lora": None, "quantization": None, "debug": type(config.debug)()}
        # Of the trained model alone: another one may have no routers, and is not exported.
        changes |= {"freeze_moe_router": False, "language_model_only": False, "vision": None}
        changes |= {"router_aux_loss_coef": 0.0, "mlp_chunk_tokens": None}
    frozen = config.model_copy(update=changes)
    return setup_model(frozen, mesh, products=products, is_frozen=True).requires_grad_(False)


class BuiltModel:
    """A model that is sharded and has no values yet."""

    def __init__(
        self, model: PreTrainedModel, read: Callable[[Container[str] | None], None], check: Callable[[], None]
    ) -> None:
        """`read` reads the weights with some names (None: all). `check` checks the model, and needs its weights."""
        self.model = model
        self._read = read
        self._check: Callable[[], None] | None = check

    def fill(self, *, is_restored: bool = False) -> PreTrainedModel:
        """Read the weights, check the model with them, and return it. Collective.

        With `is_restored`, only those that checkpoints do not hold; the others must be restored before `check`.
        """
        self._read(frozen_names(self.model) if is_restored else None)
        if not is_restored:
            self.check()
        return self.model

    def check(self) -> None:
        """Check the model with the weights that it has, unless that is done. Collective."""
        if self._check is not None:
            self._check()
            self._check = None


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    has_dropout: bool = False,
    products: ProductChoice | None = None,
    is_scored: bool = False,
    embeddings: int = 0,
    is_frozen: bool = False,
) -> BuiltModel:
    """Build and shard the model, and find its weights. Collective.

    With `is_scored` it is a reward model: Transformers' class for sequence classification with one label. Its head
    `score` is drawn, unless the checkpoint is of that class.

    It gets more embeddings if it has less than `embeddings`; the new ones are the mean of the others. With `is_frozen`,
    nothing of it is trained.

    `products` chooses how matrix products are computed on a CPU; None: without measuring.

    With `has_dropout`, the model is in training mode, with the dropouts of its config and of its adapters. Without, it
    is in evaluation mode: its log-probabilities are a function of its weights and the tokens before, as RL's importance
    ratios assume.

    Weights are stored and optimized in `optimization_dtype`, forward and backward run in the compute dtype, and
    gradients are reduced in `reduce_dtype`. The FSDP units are the decoder blocks and the root module, also with a
    single process, so that every run takes the same code path. Run the model through `scoring.score_tokens`, or call it
    like any Transformers model with `use_cache=False`.

    Raises:
        ModelError: there is no model at `config.name`, or it is not supported.
    """
    own_beats().say("loading the model")
    process = mesh.process
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model_config, is_part = load_model_config(config, is_scored=is_scored, is_frozen=is_frozen)
    kind: Any = AutoModelForCausalLM if config.vision is None else AutoModelForImageTextToText
    if is_scored:
        kind = _reward_class(config, model_config)
    added = _add_embeddings(model_config, embeddings, process)
    options = _model_options(config, model_config, process)
    home = torch.device("cpu") if config.fsdp_cpu_offload else process.device
    # Without values, which come after sharding: no process ever holds the whole model.
    model = _build_blank(kind, model_config, options)
    # Before adapters and sharding change what there is.
    shape = None if config.ac is None or config.ac.memory_gib is None else _shape_of(model)
    if config.vision is not None:
        attach_vision(model, _processor_files(config.name), config.vision.tower_lr)
    if is_scored and not has_score(model):
        raise ModelError(f"model.name = {config.name}: {type(model).__name__} has no head `score`: not supported")
    weights: Weights
    if config.debug.random_init:
        if is_part and process.is_main:
            name = type(model).__name__
            get_logger().info(f"model.debug.random_init: exports hold the language model alone, as {name}")

        def draw(model: PreTrainedModel, stored: Mapping[str, Stored], only: Container[str] | None) -> None:
            for names, drawn in _draw(kind, model_config, options, process):
                spread(model, drawn, names, options["dtype"], stored)

        weights = Weights(draw)
    else:
        weights = _find_weights(config, model, options["dtype"], process, is_part, adds_embeddings=added > 0)
    compute_buffers(model, float32_names(model, options["dtype"]))
    add_adapters(model, config.lora, compute_dtype(config, process.device))
    if config.lora is not None and process.is_main:
        log_adapters(model)
    if is_frozen and config.lora is None:  # with adapters, what they leave trained is not quantized
        model.requires_grad_(False)
    quantized = (
        keep_quantized(model, weights.packed, weights.changed)
        if config.quantization is None
        else quantize_layers(model, config.quantization)
    )
    fix_rotary_lengths(model, config.seq_len)
    if config.freeze_moe_router:
        freeze_routers(model)
    if process.device.type == "cpu" and config.compile is None:
        use_lean_norms(model)
    if process.device.type == "cpu" and config.compile is None and mesh.tensor_axis is None:
        choice = products or ProductChoice.without_measuring()
        hidden_size = model.config.get_text_config().hidden_size
        _use_lean_products(model, choice.products(hidden_size, compute_dtype(config, process.device)))
    # After all that reads whole weights, and before FSDP, which shards the parts of each process further.
    sharing_heads = 1 if mesh.tensor_axis is None else divide_layers(model, mesh.tensor_axis.sharing, process)
    divide_experts(model, mesh, needs_experts=config.ep > 1)
    is_random = has_dropout and bool(dropouts := dropouts_of(config, model_config))
    if is_random and (fault := ModelDescription(model_config.to_dict()).dropout_fault(config)):
        raise ModelError(f"model.name = {config.name}: {fault}")
    if is_random and process.is_main:
        get_logger().info(f"Dropout: {', '.join(f'{key} = {value:g}' for key, value in dropouts.items())}")
    # A compiled block would have a graph for every number of sequences: there, each sequence has a row to itself.
    layers = StateLayers(model, mesh.context_axis) if config.compile is None else None
    if mesh.context_axis is not None:
        divide_kernel(model.config._attn_implementation)
    if layers and process.is_main:
        get_logger().info(f"Layers with a state: {layers.description}")
    # Compiled code does not see what a router is told.
    routers = Routers(model) if config.compile is None else None
    if config.router_aux_loss_coef > 0 and routers is not None:
        if routers.fault is not None:
            raise ModelError(f"model.router_aux_loss_coef: {routers.fault}")
        routers.auxiliary_coef = config.router_aux_loss_coef
    prepare_blocks(model, config, process.device, is_random, layers, routers, shape)
    _shard(model, config, mesh)
    model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor)

    def read(only: Container[str] | None) -> None:
        if only is not None:
            for each in quantized.values():
                each.leave_adapter()
        weights.read(model, quantized, only)
        if quantized:
            log_quantization(quantized, process)
        # Checkpoints hold all of an adapter, also what PiSSA and LoftQ found.
        if config.lora is not None and only is None:
            draw_adapters(model)
            if config.lora.path is not None:
                load_adapter(model, Path(config.lora.path), is_main=process.is_main)
        if is_random:
            # PyTorch starts with another seed in each process, so that no run could be repeated.
            # Those that divide layers must drop alike what they compute alike.
            torch.manual_seed(_DROPOUT_SEED + process.rank // config.tp)

    if not is_scored:
        model.generation_config = _generation_config(model, config, process)
    enable_scoring(model, layers, mesh, sharing_heads, routers)
    # With compilation, every combination of sequence lengths would need its own graph.
    is_separable = process.device.type == "cpu" and config.compile is None and not is_random
    optional = [SequenceBlocks if is_separable else PrefixTree]

    def check() -> None:
        if has_dropout:
            model.eval()
        else:
            leave_dropout_out(model)
        keep_gradients(model, process)
        check_scoring(model, process.device, config.seq_len, optional)
        if has_dropout:
            model.train()

    return BuiltModel(model, read, check)


def _filled(build: Callable[_Options, BuiltModel]) -> Callable[_Options, PreTrainedModel]:
    return lambda *values, **options: build(*values, **options).fill()


setup_model = _filled(build_model)
"""Build the model and fill it: for models that are restored from no checkpoint. Collective."""


def export_dtype(config: ModelConfig, weights: WeightCheckpointConfig | None, device: torch.device) -> torch.dtype:
    """Dtype of exported weights: the configured one, or that of the model's own files.

    A model whose config names none is exported in the compute dtype.
    """
    if weights is not None and weights.dtype != "auto":
        return _DTYPES[weights.dtype]
    own = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code).dtype
    if own is None:
        return compute_dtype(config, device)
    return torch.bfloat16 if own == torch.float16 else own


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Dtype of forward and backward passes and of exported weights. `auto` is bfloat16 on a GPU, float32 on a CPU."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.compute_dtype]


def dropouts_of(config: ModelConfig, model_config: PretrainedConfig) -> dict[str, float]:
    """Everything that makes training random: the positive dropout and jitter settings of the model and its adapters."""
    settings = {**model_config.get_text_config().to_dict(), "model.lora.dropout": config.lora and config.lora.dropout}
    named = {key: value for key, value in settings.items() if any(word in key for word in ("drop", "jitter"))}
    return {key: value for key, value in named.items() if isinstance(value, float) and value > 0}


def leave_dropout_out(model: nn.Module) -> None:
    """Put the model in evaluation mode. Of a model that brings its own code, only the dropout modules.

    Such code may compute no gradients in evaluation mode, as DeepSeek's does in its experts. If it applies dropout by
    other means, the start check refuses it.
    """
    model.train(own_class(model) is not None)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


def load_model_config(
    config: ModelConfig, *, is_scored: bool = False, is_frozen: bool = False
) -> tuple[PretrainedConfig, bool]:
    """Load the Transformers config of `config.name`, reduced to `debug.num_layers` layers.

    Of a checkpoint of several parts, it is the config of the language part; the second value is True then.

    Raises:
        ModelError: there is no model config at `config.name`, or its parts or quantized weights are not
            supported.
    """
    try:
        with loading_code(config.trust_remote_code):
            model_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
            if config.trust_remote_code:
                load_model_class(model_config, config.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(load_error("model.name", config.name, error)) from error
    description = ModelDescription(model_config.to_dict())
    if fault := description.parts_fault() or (description.scoring_fault() if is_scored else None):
        raise ModelError(f"model.name = {config.name}: {fault}")
    if config.vision is not None and (fault := vision_fault(description.family)):
        raise ModelError(f"model.name = {config.name}: {fault}")
    is_part = description.has_known_language_part and config.vision is None
    if is_part:
        model_config = language_config(model_config)
    # A model of the hub that was not in this machine's cache at the start is checked here.
    described = ModelDescription(model_config.to_dict())
    if fault := described.division_fault(config) or described.storing_fault(config, is_frozen=is_frozen):
        raise ModelError(f"model.name = {config.name}: {fault}")
    # Exports are plain weights.
    vars(model_config).pop("quantization_config", None)
    if config.debug.num_layers is not None:
        text = model_config.get_text_config()
        layers = text.num_hidden_layers = min(config.debug.num_layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return model_config, is_part


def _processor_files(name: str) -> dict[str, bytes]:
    """The files of the processor of a checkpoint."""
    found = ((file, cached_file(name, file, _raise_exceptions_for_missing_entries=False)) for file in PROCESSOR_FILES)
    return {file: Path(path).read_bytes() for file, path in found if path is not None}


def _add_embeddings(model_config: PretrainedConfig, wanted: int, process: Process) -> int:
    """Raise the vocabulary size of a config to `wanted`, and return by how much.

    Raises:
        ModelError: the model has further embeddings, which would stay too few.
    """
    text = model_config.get_text_config()
    held = text.vocab_size
    if wanted > held and (fault := ModelDescription(text.to_dict()).enlarging_fault):
        raise ModelError(f"tokenizer.add_tokens: {fault}")
    if wanted > held:
        text.vocab_size = wanted
        if process.is_main:
            get_logger().info(f"Embeddings: {wanted - held} more for added tokens ({held} -> {wanted})")
    return max(0, wanted - held)


def freeze_routers(model: nn.Module) -> None:
    """Freeze the routers of a mixture-of-experts model.

    Raises:
        ModelError: the model has no router.
    """
    routers = [module for name, module in model.named_modules() if _is_router(name, module)]
    if not routers:
        raise ModelError(f"model.freeze_moe_router: {type(model).__name__} has no router")
    for router in routers:
        router.requires_grad_(False)


def check_routers(model: PreTrainedModel) -> None:
    """Check that the engine's choice of experts can be replayed.

    Raises:
        ModelError: the model has no such routers.
    """
    routers = scoring_of(model).routers
    if routers is not None and routers.fault is not None:
        raise ModelError(f"enable_router_replay: {routers.fault}")


def _model_options(config: ModelConfig, model_config: PretrainedConfig, process: Process) -> dict[str, Any]:
    """Arguments for Transformers to build the model. Logs the selected attention kernel."""
    compute = compute_dtype(config, process.device)
    kernel, reason = choose_attention(config.attn, model_config, process.device, compute)
    if config.vision is not None and FAMILIES[model_config.model_type].sees_whole_images and kernel != SDPA:
        kernel, reason = SDPA, "tokens of an image attend to each other"
    if process.is_main:
        get_logger().info(f"Attention: {kernel}{f' ({reason})' if reason else ''}")
    options = {
        "dtype": _DTYPES[config.optimization_dtype],
        "attn_implementation": kernel,
        "trust_remote_code": config.trust_remote_code,
    }
    return options if config.moe_use_grouped_mm else options | {"experts_implementation": "eager"}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that a model will have."""

    read: Callable[[PreTrainedModel, Mapping[str, Stored], Container[str] | None], None]
    """Puts them into the model once it is sharded, at least the `Stored` ones and those of the names (None: all)."""
    packed: Mapping[str, Packed] = field(default_factory=dict)
    """Those that the files hold in 4 bits."""
    changed: frozenset[str] = frozenset()
    """Names of those into which an adapter is merged."""


def _find_weights(
    config: ModelConfig,
    model: PreTrainedModel,
    dtype: torch.dtype,
    process: Process,
    is_part: bool,
    *,
    adds_embeddings: bool,
) -> Weights:
    """Find the weights of `model`, which has no values yet, in the checkpoint `config.name`. Collective.

    With `is_part`, the checkpoint has several parts, and the model is its language part.

    Raises:
        ModelError: there are no such files, or they lack a weight.
    """
    draws_score = has_score(model) and not is_classifier(model.config)
    try:
        plan = find_weights(
            model,
            config.name,
            dtype,
            process,
            is_part=is_part,
            draws_score=draws_score,
            adds_embeddings=adds_embeddings,
        )
    except StartFault as error:
        raise ModelError(f"model.name = {config.name}: {error}") from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        hint = "; to start from random weights set model.debug.random_init = true"
        raise ModelError(load_error("model.name", config.name, error) + hint) from error
    if process.is_main and config.debug.num_layers is None and (unused := unused_tensors(plan.report)):
        get_logger().warning(unused)
    # How the files name the weights, and so how an export does.
    model._weight_conversions = plan.conversions  # type: ignore[assignment]
    if config.language_model_only:
        _export_alone(model, process)
    merge = None if config.adapter is None else Merge.of(model, Path(config.adapter))
    if merge is not None and process.is_main:
        get_logger().info(f"Merged the adapter {merge.folder} into the model")
    change = unchanged if merge is None else merge.change

    def read(model: PreTrainedModel, stored: Mapping[str, Stored], only: Container[str] | None) -> None:
        count, held = fill(model, plan, dtype, change, stored, only=only)
        if only is not None and process.is_main:
            name = config.name
            get_logger().info(f"Read {count} of {held} tensors from {name}: the checkpoint holds the others")
        if draws_score and only is None:
            draw_score(model)

    return Weights(read, plan.packed, frozenset() if merge is None else merge.changed)


def _draw(
    kind: Any, model_config: PretrainedConfig, options: dict[str, Any], process: Process
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """Random weights from a fixed seed: the names of one decoder block's at a time, and on rank 0 their values.

    A few families, and models with their own code, set values where they make weights. Of these, rank 0 makes a whole.
    """
    device, whole = process.device, _build_blank(kind, model_config, options)
    state = {name: each for name, each in whole.state_dict().items() if each.is_floating_point()}
    block_of = {module: number for number, block in enumerate(decoder_blocks(whole), 1) for module in block.modules()}
    units: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in whole.named_modules():
        units.setdefault(block_of.get(module, 0), []).append((path, module))
        module._is_hf_initialized = True  # Transformers leaves it as it is
    made: dict[str, Tensor] = {}
    for number, unit in units.items():
        places: list[tuple[str, dict[str, Any], str]] = [
            (f"{path}.{name}", held, name)
            for path, module in unit
            for held in (cast("dict[str, Any]", module._parameters), module._buffers)
            for name in held
            if f"{path}.{name}" in state
        ]
        drawn: dict[str, Tensor] = {}
        if process.is_main:
            for each, held, name in places:
                unset = torch.full_like(state[each], torch.nan, device=device)
                held[name] = nn.Parameter(unset) if isinstance(held[name], nn.Parameter) else unset
            with _seeded(device, _RANDOM_INIT_SEED + number), torch.no_grad():
                for _, module in unit:
                    module._is_hf_initialized = False  # type: ignore[assignment]
                whole.initialize_weights()
            drawn = {each: held[name].detach() for each, held, name in places}
            if missing := [each for each, values in drawn.items() if values.isnan().any()]:
                with _seeded(device, _RANDOM_INIT_SEED):
                    made = (
                        made or _in_one_dtype(kind.from_config(model_config, **options), options["dtype"]).state_dict()
                    )
                drawn |= {each: made[each] for each in missing}
            for _, held, name in places:
                held[name] = None
        yield [each for each, _, _ in places], drawn


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from `seed`, on `device` where none is named: a GPU draws much faster than a host."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        yield


def _export_alone(model: PreTrainedModel, process: Process) -> None:
    """Make exports of `model` leave the other tensors of its checkpoint out."""
    part, name = part_of(model), type(model).__name__
    if part is None:
        if process.is_main:
            get_logger().warning(f"model.language_model_only has no effect: {name} is a language model alone")
        return
    attach(model, replace(part, is_exported_alone=True))
    if process.is_main:
        get_logger().info(
            f"model.language_model_only: exports hold the language model alone, as {name}, without "
            f"{len(part.names_of_others())} other tensors of the checkpoint"
        )


def _build_blank(kind: Any, model_config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model that the code of its family builds, without values. `kind` is an automatic class of Transformers."""
    with torch.device("meta"):
        model = _in_one_dtype(kind.from_config(model_config, **options), options["dtype"])
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # Llama 4's class names its place in another class
    return model


def _shape_of(model: PreTrainedModel) -> ModelShape:
    """What `--estimate` reads from a model's files, for which it needs some of a known format."""
    tensors = {name: tuple(each.shape) for name, each in model.named_parameters() if not is_of_tower(name)}
    return ModelShape(with_usual_names(model.config.to_dict()), tensors)


def _reward_class(config: ModelConfig, model_config: PretrainedConfig) -> Any:
    """The automatic class of a reward model. Sets the number of its labels.

    Raises:
        ModelError: Transformers has no such class for the model.
    """
    if MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model_config), None) is None:
        kind = model_config.model_type
        raise ModelError(
            f"model.name = {config.name}: Transformers has no class for a reward model of the type {kind!r}"
        )
    model_config.num_labels = 1
    return AutoModelForSequenceClassification


def is_classifier(model_config: PretrainedConfig) -> bool:
    """Whether the checkpoint of a config has the head of a class for sequence classification."""
    return any(name.endswith("ForSequenceClassification") for name in model_config.architectures or ())


_SCORE_SEED = 0


def draw_score(model: PreTrainedModel) -> None:
    """Draw the head `score` of a sharded model as Transformers does, alike for any number of processes."""
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    weight = model.get_parameter("score.weight")
    generator = torch.Generator().manual_seed(_SCORE_SEED)
    put_own(weight, torch.empty(weight.shape).normal_(0, std, generator=generator))


def _in_one_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Some families keep a few weights in float32, and FSDP takes one dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _use_lean_products(model: PreTrainedModel, products: Products) -> None:
    use_lean_mlps(model, products)
    use_lean_linears(model, products)


def _shard(model: PreTrainedModel, config: ModelConfig, mesh: Mesh) -> None:
    device = mesh.process.device
    master, compute = _DTYPES[config.optimization_dtype], compute_dtype(config, device)
    reduce = _DTYPES[config.reduce_dtype]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=None if reduce == compute else reduce
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.fsdp_cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    of_blocks = mesh.fsdp if mesh.tensor_axis is None else mesh.tensor_axis.fsdp
    for block in decoder_blocks(model):
        shard_experts(block, mesh, partial(shard, reshard_after_forward=config.reshard_after_forward), policy)
        shard(block, mesh=of_blocks, reshard_after_forward=config.reshard_after_forward)
    # Embeddings and head are whole layers: no two processes hold the same part of them, and FSDP's average over
    # processes that computed the same gradient is that gradient.
    shard(model, mesh=mesh.fsdp)


def _generation_config(model: PreTrainedModel, config: ModelConfig, process: Process) -> GenerationConfig:
    """Exported with the model, so that only the main process reads the checkpoint's.

    A model that brings its own code may have none.
    """
    part = part_of(model)
    if part is not None and (part.folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(part.folder)
    own = getattr(model, "generation_config", None)
    if own is not None and part is None and process.is_main and not config.debug.random_init:
        try:
            own = GenerationConfig.from_pretrained(config.name)
        except OSError:
            own = GenerationConfig.from_pretrained(config.name, config_file_name="config.json", _from_model_config=True)
    return own or GenerationConfig.from_model_config(model.config)


def _is_router(name: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") or name.rpartition(".")[2] in ("gate", "router")
