"""Builds the model to train (a Transformers model sharded with FSDP2) and loads its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
)
from transformers.utils import logging as transformers_logging

from prime_rl.checks.chat_templates import read_template
from prime_rl.checks.model_files import quantization_fault
from prime_rl.checks.start_dir import looks_like_path
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig, WeightCheckpointConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.kernels.attention import choose_attention
from prime_rl.trainer.kernels.lean_layers import use_lean_mlps, use_lean_norms
from prime_rl.trainer.kernels.product_choice import ProductChoice
from prime_rl.trainer.kernels.products import Products, use_lean_linears
from prime_rl.trainer.model.blocks import decoder_blocks, prepare_blocks
from prime_rl.trainer.model.layouts import PrefixTree, SequenceBlocks
from prime_rl.trainer.model.lora import add_adapters, log_adapters
from prime_rl.trainer.model.scoring import enable_scoring
from prime_rl.trainer.model.start_check import check_scoring
from prime_rl.trainer.optim.kept_gradients import keep_gradients
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.utils.errors import StartFault
from prime_rl.utils.files import locked_file
from prime_rl.utils.logger import get_logger
from prime_rl.utils.model_lengths import fix_rotary_lengths


def own_class(model: nn.Module) -> type | None:
    """The class that a model brought with it; None for those of Transformers."""
    return next((each for each in type(model).__mro__ if each.__module__.startswith("transformers_modules.")), None)


@contextmanager
def loading_code(is_trusted: bool) -> Iterator[None]:
    """Let no other rank load code during the block, if it loads some.

    Transformers copies the code to its cache before it imports it, and a rank could import what another one is writing.
    """
    if not is_trusted:
        yield
        return
    # Looked up at each call: a program can set another cache.
    cache = Path(dynamic_module_utils.HF_MODULES_CACHE)
    with ExitStack() as stack:
        # Without a lock, nothing is lost in a cache that cannot be written: nobody writes there.
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked_file(cache / "prime_rl.lock"))
        yield


def load_model_class(model_config: PretrainedConfig, name: str) -> None:
    """Load the class of the model at `name`, if its config names one of the model's own. It stays loaded."""
    reference = (getattr(model_config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None:
        dynamic_module_utils.get_class_from_dynamic_module(reference, name)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BUFFER_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
_RANDOM_INIT_SEED = 0
_DROPOUT_SEED = 0


def setup_model(
    config: ModelConfig, mesh: Mesh, *, has_dropout: bool = False, products: ProductChoice | None = None
) -> PreTrainedModel:
    """Build, load and shard the model. Collective.

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
    model_config = load_model_config(config)
    options = _model_options(config, model_config, process)
    home = torch.device("cpu") if config.fsdp_cpu_offload else process.device
    adapt = partial(add_adapters, config=config.lora, compute_dtype=compute_dtype(config, process.device))
    # Only rank 0 reads the weights; the other ranks receive their shards from it.
    built_on = home if process.world_size == 1 else torch.device("cpu")
    full = adapt(_build_full(config, model_config, options, built_on)) if process.is_main else None
    if full is not None and process.world_size == 1:
        # Transformers decorates `to`, which hides from type checkers that it is a method.
        model = full.to(home)  # type: ignore[arg-type]
    else:
        model = adapt(_untied_like(full, _build_blank(model_config, options), process))
    if config.lora is not None and process.is_main:
        log_adapters(model)
    for built in (full, model):
        if built is not None:
            fix_rotary_lengths(built, config.seq_len)
    if config.freeze_moe_router:
        freeze_routers(model)
    if process.device.type == "cpu" and config.compile is None:
        choice = products or ProductChoice.without_measuring()
        hidden_size = model.config.get_text_config().hidden_size
        _use_lean_kernels(model, choice.products(hidden_size, compute_dtype(config, process.device)))
    is_random = has_dropout and bool(dropouts := dropouts_of(config, model_config))
    if is_random and process.is_main:
        get_logger().info(f"Dropout: {', '.join(f'{key} = {value:g}' for key, value in dropouts.items())}")
    prepare_blocks(model, config, process.device, is_random)
    _shard(model, config, mesh)
    if process.world_size > 1:
        _scatter_weights(full, model, home, process)
    if full is not None:
        # How the files name the weights, and so how an export does. Only a model that was loaded knows.
        model._weight_conversions = getattr(full, "_weight_conversions", None)
    model.generation_config = _generation_config(model if full is None else full)
    keep_gradients(model, process)
    enable_scoring(model)
    # With compilation, every combination of sequence lengths would need its own graph.
    is_separable = process.device.type == "cpu" and config.compile is None and not is_random
    if has_dropout:
        model.eval()
    else:
        leave_dropout_out(model)
    check_scoring(model, process.device, config.seq_len, [SequenceBlocks if is_separable else PrefixTree])
    if has_dropout:
        model.train()
    if is_random:
        # PyTorch starts with another seed in each process, so that no run could be repeated.
        torch.manual_seed(_DROPOUT_SEED + process.rank)
    return model


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


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """Load the Transformers config of `config.name`, reduced to `debug.num_layers` layers.

    Raises:
        ModelError: there is no model config at `config.name`, or its weights are quantized.
    """
    try:
        with loading_code(config.trust_remote_code):
            model_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
            if config.trust_remote_code:
                load_model_class(model_config, config.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_load_error("model.name", config.name, error)) from error
    if fault := quantization_fault(getattr(model_config, "quantization_config", None)):
        raise ModelError(f"model.name = {config.name}: {fault}")
    if config.debug.num_layers is not None:
        layers = min(config.debug.num_layers, model_config.num_hidden_layers)
        model_config.num_hidden_layers = layers
        if getattr(model_config, "layer_types", None):
            model_config.layer_types = model_config.layer_types[:layers]
    return model_config


def setup_tokenizer(config: TokenizerConfig, model_config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `config.name` (None means the model's), and set `config.chat_template` if given.

    Raises:
        ModelError: the tokenizer or the chat template cannot be loaded.
    """
    name = config.name or model_config.name
    trust = model_config.trust_remote_code if config.trust_remote_code is None else config.trust_remote_code
    try:
        with loading_code(trust):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, ImportError) as error:
        key = "model.name" if config.name is None else "tokenizer.name"
        raise ModelError(_load_error(key, name, error)) from error
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = read_template("tokenizer.chat_template", config.chat_template)
        except StartFault as fault:
            raise ModelError(str(fault)) from fault
    return tokenizer


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


def _model_options(config: ModelConfig, model_config: PretrainedConfig, process: Process) -> dict[str, Any]:
    """Arguments for Transformers to build the model. Logs the selected attention kernel."""
    compute = compute_dtype(config, process.device)
    kernel, reason = choose_attention(config.attn, model_config, process.device, compute)
    if process.is_main:
        get_logger().info(f"Attention: {kernel}{f' ({reason})' if reason else ''}")
    options = {
        "dtype": _DTYPES[config.optimization_dtype],
        "attn_implementation": kernel,
        "trust_remote_code": config.trust_remote_code,
    }
    return options if config.moe_use_grouped_mm else options | {"experts_implementation": "eager"}


def _build_full(
    config: ModelConfig, model_config: PretrainedConfig, options: dict[str, Any], device: torch.device
) -> PreTrainedModel:
    """Build the unsharded model: loaded from `config.name` in host memory, or drawn on `device` from a fixed seed.

    A GPU draws random weights much faster than a host: one core took 9 s for 0.6B parameters.
    """
    try:
        if config.debug.random_init:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(_RANDOM_INIT_SEED)
                return _in_one_dtype(AutoModelForCausalLM.from_config(model_config, **options), options["dtype"])
        model = AutoModelForCausalLM.from_pretrained(config.name, config=model_config, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        hint = "" if config.debug.random_init else "; to start from random weights set model.debug.random_init = true"
        raise ModelError(_load_error("model.name", config.name, error) + hint) from error
    # Loading makes every weight a trained one, also those that the model's code declares as frozen.
    for name, declared in _build_blank(model_config, options).named_parameters():
        model.get_parameter(name).requires_grad_(declared.requires_grad)
    return _in_one_dtype(model, options["dtype"])


def _build_blank(model_config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model that the code of its family builds, without values."""
    with torch.device("meta"):
        return _in_one_dtype(AutoModelForCausalLM.from_config(model_config, **options), options["dtype"])


def _in_one_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Some families keep a few weights in float32, and FSDP takes one dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _use_lean_kernels(model: PreTrainedModel, products: Products) -> None:
    use_lean_norms(model)
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
    shard = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    for block in decoder_blocks(model):
        shard(block, reshard_after_forward=config.reshard_after_forward)
    shard(model)


def _scatter_weights(full: nn.Module | None, model: nn.Module, home: torch.device, process: Process) -> None:
    """Fill the sharded model of every rank from rank 0's `full` model. Parameters are stored on `home`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=home)
    # Not strict: buffers come below. torch would pickle those that are a single number, which no rank accepts.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    weights: dict[str, Any] = {} if full is None else dict(full.named_parameters(remove_duplicate=False))
    set_model_state_dict(model, weights, options=options)
    # Buffers such as the rotary frequencies are in no state dict. Loading may have changed the dtypes of others.
    buffers = list(model.named_buffers())
    # Numbers, so that nothing is unpickled.
    own = [0 if full is None else _BUFFER_DTYPES.index(full.get_buffer(name).dtype) for name, _ in buffers]
    dtypes = torch.tensor(own, dtype=torch.long, device=process.device)
    dist.broadcast(dtypes, src=0)
    for (name, buffer), number in zip(buffers, dtypes.tolist(), strict=True):
        filled = (buffer if full is None else full.get_buffer(name)).to(process.device, _BUFFER_DTYPES[number])
        dist.broadcast(filled, src=0)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, filled)


def _untied_like(full: PreTrainedModel | None, blank: PreTrainedModel, process: Process) -> PreTrainedModel:
    """Give the weights of `blank` that its config ties and rank 0's `full` model does not a separate tensor.

    Transformers unties weights whose files hold different values. Collective. Returns `blank`.
    """
    tied = sorted(blank.all_tied_weights_keys)
    if not tied:
        return blank
    is_tied = torch.tensor([full is None or name in full.all_tied_weights_keys for name in tied], device=process.device)
    dist.broadcast(is_tied, src=0)
    for name, stays in zip(tied, is_tied.tolist(), strict=True):
        if not stays:
            del blank.all_tied_weights_keys[name]
            owner, _, own_name = name.rpartition(".")
            own = nn.Parameter(torch.empty_like(blank.get_parameter(name)))
            setattr(blank.get_submodule(owner), own_name, own)
    return blank


def _generation_config(loaded: PreTrainedModel) -> GenerationConfig:
    """Exported with the model. It is read together with the weights, so that only the `loaded` model has it.

    A model that brings its own code may have none.
    """
    own = getattr(loaded, "generation_config", None)
    return own or GenerationConfig.from_model_config(loaded.config)


def _is_router(name: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") or name.rpartition(".")[2] in ("gate", "router")


def _load_error(key: str, name: str, error: Exception) -> str:
    """One-line error message for a failure to load `name`, the value of config key `key`."""
    # Some of Transformers' messages begin with an empty line.
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if Path(name).is_dir():
        return f"{key} = {name}: {reason}"
    if looks_like_path(name):
        return f"{key} = {name}: no such directory"
    # Also for a hub that cannot be reached, or that asks for a login; the reason tells these apart.
    missing = "no such directory, and not found in the model hub or its local cache: "
    return f"{key} = {name}: {missing if isinstance(error, OSError) else ''}{reason}"
