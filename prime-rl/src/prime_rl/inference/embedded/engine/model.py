"""Loads the model and runs its forward pass over running sequences and new prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from prime_rl.checks.model_description import DECODED_LAYERS, STATE_LAYERS, ModelDescription
from prime_rl.checks.model_files import loading_fault
from prime_rl.inference.embedded.engine.attention import ATTENTION_NAME, PromptBatch, SlotStep, register_slot_attention
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.common_start import CommonStart, Origin
from prime_rl.inference.embedded.engine.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from prime_rl.inference.embedded.engine.fused import FusedDecoder
from prime_rl.inference.embedded.engine.lora import Adapter, AdapterLimits, AdapterStore, LinearHooks, StepAdapters
from prime_rl.inference.embedded.engine.states import StateLayers, TokenBatch
from prime_rl.inference.embedded.engine.tensors import on_device
from prime_rl.inference.embedded.engine.vision import PromptImages, StepImages, Tower, load_tower
from prime_rl.inference.embedded.engine.weights import load_weights
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.model_files import mismatch_error
from prime_rl.transport.images import Family
from prime_rl.transport.language_part import language_config, part_of
from prime_rl.transport.loading import (
    Alone,
    Checkpoint,
    allocate,
    compute_buffers,
    fill,
    find_weights,
    float32_names,
    unchanged,
)
from prime_rl.transport.residence import Residence
from prime_rl.transport.routing import Routers, Routing
from prime_rl.utils.errors import StartFault, first_line
from prime_rl.utils.model_lengths import bypassed_layers, fix_rotary_lengths, tightened

Forward = Callable[..., tuple[Tensor, list[Iterator[Tensor]]]]
"""`ModelRunner.forward`."""

_LENGTH = 12
"""Length of the probe in tokens, longer than a `tightened` window."""
_CACHED = 4
_DECODED = 3
"""Numbers of tokens at the start and at the end of the probe that are read in separate steps."""

_EXACT, _ROUNDED = 1e-4, 0.25
"""Largest norm of a difference between logits, relative to their norm: in float32 on a CPU, and in bfloat16 or TF32.
With SmolLM2-135M, two attention kernels differ by 1e-6 in float32 and by 0.02 in bfloat16, where rounding can also send
a token to another expert. Ignoring a window makes a difference of 0.7."""


@torch.inference_mode()
def check_positions(model: PreTrainedModel, max_model_len: int) -> None:
    """Check that a token's logits do not depend on the largest position in its batch.

    Raises:
        EngineError: they do, so they would change with the other sequences of a batch.
    """
    tokens = torch.tensor([_probe(model, _LENGTH + 1)], device=model.device)
    positions = torch.arange(_LENGTH + 1, device=model.device)[None]
    far = positions.clone()
    far[0, -1] = max(max_model_len - 1, _LENGTH)
    with _eager(model):
        near, own = (
            model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :_LENGTH]
            for places in (far, positions)
        )
    if not _is_close(near, own):
        raise EngineError(
            f"{type(model).__name__} computes positions that depend on the other sequences of the batch, which is not "
            "supported"
        )


@torch.inference_mode()
def check_slots(model: PreTrainedModel, forward: Forward, keeps_prefixes: bool) -> None:
    """Check prefill, kept prefixes and decoding against eager attention on the whole probe. Uses slot row 0.

    Raises:
        EngineError: the engine computes other logits than Transformers.
    """
    probe, end = _probe(model, _LENGTH), _LENGTH - _DECODED
    with tightened(model):
        with _eager(model):
            own = model(input_ids=torch.tensor([probe], device=model.device), use_cache=False).logits[0]
        parts: list[Iterator[Tensor]] = []
        if keeps_prefixes:
            parts = forward([], [probe[: _CACHED + 1]], [0], full_prompts=[0])[1]
        cached = [_CACHED] if keeps_prefixes else []
        last, middle = forward([], [probe[:end]], [0], num_cached=cached, full_prompts=[0])
        prompt = [logits for part in (*parts, *middle) for logits in part]
        decoded = [forward([probe[: index + 1]], [], [])[0] for index in range(end, _LENGTH)]
    if not _is_close(torch.cat([*prompt, last, *decoded]), own):
        raise EngineError(f"{type(model).__name__} has an attention that the embedded engine does not support")


def _probe(model: PreTrainedModel, length: int) -> list[int]:
    """Token ids, spread over the vocabulary: after special tokens, which come first, bfloat16 is far less exact."""
    vocab_size = model.config.get_text_config().vocab_size
    return [(4321 + 7919 * index) % vocab_size for index in range(length)]


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with Transformers' eager attention in the block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _is_close(ours: Tensor, own: Tensor) -> bool:
    tolerance = _EXACT if own.dtype == torch.float32 and own.device.type == "cpu" else _ROUNDED
    return bool((ours.float() - own.float()).norm() <= tolerance * own.float().norm())


FindCommonStart = Callable[[SequenceOf[Origin], torch.device], CommonStart | None]
TOKENS_AT_ONCE = 256
"""Tokens of a prompt of which logits are held at once: 160 MB in float32, for a vocabulary of 152,000."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N tokens of a step: those of running sequences, then those of prompts."""

    ids: list[int]
    positions: list[int]
    images: StepImages | None


class ModelRunner:
    """A causal language model and the key-value slots of the running sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv_budget_bytes: int,
        weights_dir: Path | None = None,
        find_common_start: FindCommonStart = CommonStart.from_origins,
        enforce_eager: bool = False,
        keeps_routes: bool = False,
        tower: Tower | None = None,
    ) -> None:
        """`enforce_eager` turns off CUDA graphs, which on a GPU replay steps that only decode. `keeps_routes`: the
        slots also hold the experts that each token was routed to. `tower` reads the images of prompts.

        Raises:
            EngineError: the model is not supported, or has no routes to keep.
        """
        self.model = model
        self.device = model.device
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.weights_dir = weights_dir
        """Directory of the initial weights; None if they cannot be reloaded."""
        self.slots = KVSlots(kv_budget_bytes, model.device)
        self._fused = FusedDecoder(model) if FusedDecoder.supports(model) else None
        self._tower = tower
        self._residence = Residence([model] if tower is None else [model, tower.whole], [], model.device)
        if tower is not None and tower.family.has_rope_positions and self._fused is None:
            raise EngineError("the positions of images of this model are not supported: set language_model_only = true")
        self._hooks = LinearHooks()
        self.state_layers = StateLayers(model, self.slots, lambda: self._hooks)
        """Layers of a hybrid model that keep a state in the slots; none in others."""
        self.routers = Routers(model) if keeps_routes else None
        """None if the slots do not keep routes."""
        if self.routers is not None and self.routers.fault is not None:
            raise EngineError(f"enable_return_routed_experts: {self.routers.fault}")
        self._find_common_start = find_common_start
        self._origins: list[Origin | None] = []
        self._shared: CommonStart | None = None
        self.graphs: DecodeGraphs | None = None
        """None if no step is replayed."""
        self._warm_up()
        if self.device.type == "cuda" and not enforce_eager:
            self.replay_with(CudaRecorder(self.device))

    def replay_with(self, recorder: Recorder) -> None:
        """Replay steps that only decode, if the model allows. Not during the warm-up, which changes its windows."""
        if self._fused is not None:
            self.graphs = DecodeGraphs(self._fused, self.slots, recorder)

    @property
    def num_replayed(self) -> int:
        """Number of steps so far that a captured graph computed."""
        return self.graphs.num_replayed if self.graphs is not None else 0

    def adapter_store(self, base_model: str, limits: AdapterLimits) -> AdapterStore:
        """Prepare the model for LoRA adapters. Call once, before the first step."""
        if self._fused is None:
            bypassed = bypassed_layers(self.model, lambda: self.forward([], [[0, 0]], [0]))
            self._hooks = LinearHooks.attach_to(self.model, without=bypassed)
        part = part_of(self.model)
        return AdapterStore(
            base_model=base_model,
            sites=self._fused.sites if self._fused is not None else self._hooks.sites,
            base={name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()},
            limits=limits,
            dtype=self.model.dtype,
            device=self.device,
            named=(lambda name: name) if part is None else part.module_in_whole,
        )

    def load_weights(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Replace the live weights by `tensors`; `source` names them in error messages.

        Raises:
            WeightError: the tensors do not fit the model. The old weights then stay live.
        """
        try:
            of_tower = None if self._tower is None else self._tower.planned(tensors)
        except StartFault as fault:
            raise mismatch_error(source, str(fault)) from fault
        load_weights(self.model, tensors, source)
        if self._tower is not None and of_tower is not None:
            self._tower.load(of_tower)
        if self._fused is not None:
            self._fused.refresh()

    @torch.inference_mode(mode=False)
    def leave_device(self) -> None:
        """Move the weights to host memory and free keys, values and graphs. No sequence may be running."""
        self.slots.free()
        if self.graphs is not None:
            self.graphs.clear()
        if self._tower is not None:
            self._tower.forget()
        self._residence.leave()

    @torch.inference_mode(mode=False)
    def come_back(self) -> None:
        """Take memory for the weights again; keys and values take theirs when sequences need it."""
        self._residence.come_back()

    @torch.inference_mode()
    def prove(self, images: PromptImages | None) -> None:
        """Raises whatever the vision tower raises for images of these sizes."""
        if self._tower is not None and images is not None:
            self._tower.prove(images)

    @torch.inference_mode()
    def forward(
        self,
        running: SequenceOf[SequenceOf[int]],
        prompts: SequenceOf[SequenceOf[int]],
        prompt_rows: SequenceOf[int],
        num_cached: SequenceOf[int] = (),
        full_prompts: SequenceOf[int] = (),
        adapters: SequenceOf[Adapter | None] = (),
        origins: SequenceOf[Origin | None] = (),
    ) -> tuple[Tensor, list[Iterator[Tensor]]]:
        """Run one step: decode the last token of every running sequence and prefill the prompts.

        Args:
            running: all tokens of the sequences in slot rows 0, 1, …; the last token is not in the slots yet.
            prompts: all tokens of each new sequence.
            prompt_rows: the slot row of each prompt.
            num_cached: number of tokens of each prompt that are in its row already; empty means none.
            full_prompts: indices into `prompts` of those whose logits are needed at every position.
            adapters: adapter of each running sequence, then of each prompt; empty means none.
            origins: prompt origin of each running sequence, then of each prompt, with their images; empty means none,
                and disables shared-prefix attention.

        Returns:
            Next-token logits [running + prompts, V], and the logits [length - 1, V] of each full prompt, in parts:
            those of a long prompt are larger than a model.
        """
        num_cached = num_cached or [0] * len(prompts)
        lengths = [len(tokens) - count for tokens, count in zip(prompts, num_cached, strict=True)]
        of_running, of_prompts = origins[: len(running)], origins[len(running) :]
        images = [None if each is None else each.images for each in of_prompts] or [None] * len(prompts)
        places = [len(tokens) - 1 for tokens in running]
        shifts = [0 if each is None else each.shift for each in of_running] or [0] * len(running)
        positions = [place + shift for place, shift in zip(places, shifts, strict=True)]
        flat = [tokens[-1] for tokens in running]
        if not prompts and (logits := self._replayed(flat, places, positions, adapters)) is not None:
            return logits, []
        read = [(of, count, len(tokens)) for of, count, tokens in zip(images, num_cached, prompts, strict=True)]
        batch = self._prompt_batch(prompt_rows, read, len(flat)) if prompts else None
        step_adapters = StepAdapters.from_owners(adapters, [1] * len(flat) + lengths, self.device)
        step = SlotStep(self.slots, places, batch, step_adapters, self._common_start(of_running))
        step_images = None if self._tower is None else self._tower.step(read, positions)
        batches: list[TokenBatch] = []
        if self.state_layers:
            assert not any(num_cached), "a state cannot be cut back to a prefix"
            batches = self.state_layers.batches(len(flat), prompt_rows, lengths, adapters)
        wanted, start = list(range(len(flat))), len(flat)
        spans = []
        for tokens, count in zip(prompts, num_cached, strict=True):
            flat.extend(tokens[count:])
            places.extend(range(count, len(tokens)))
            positions.extend(range(count, len(tokens)))
            spans.append((start, len(flat) - 1))
            wanted.append(len(flat) - 1)
            start = len(flat)
        num_next = len(wanted)
        starts = []
        for index in full_prompts:
            starts.append(len(wanted))
            wanted.extend(range(*spans[index]))
        routing = Routing()
        with self.state_layers.on(batches), nullcontext() if self.routers is None else self.routers.on(routing):
            logits_at = self._logits(step, Tokens(flat, positions, step_images), wanted)
        if self.routers is not None:
            rows = [
                *range(len(running)),
                *(row for row, count in zip(prompt_rows, lengths, strict=True) for _ in range(count)),
            ]
            self._keep_routes(self.routers, routing, rows, places)
        full = [_in_parts(logits_at, *ends) for ends in pairwise([*starts, len(wanted)])]
        return logits_at(slice(num_next)), full

    def _prompt_batch(
        self, rows: SequenceOf[int], read: SequenceOf[tuple[PromptImages | None, int, int]], offset: int
    ) -> PromptBatch:
        """The prompts in slot rows, of which images and places [begin, end) are `read`, behind `offset` tokens."""
        seen = [None if of is None or of.last_seen_T is None else of.last_seen_T[begin:end] for of, begin, end in read]
        begins = [begin for _, begin, _ in read]
        return PromptBatch(rows, [end - begin for _, begin, end in read], begins, offset, self.device, seen)

    def _replayed(
        self, tokens: list[int], places: list[int], positions: list[int], adapters: SequenceOf[Adapter | None]
    ) -> Tensor | None:
        """Logits [B, V] of a step that only decodes; None if it is not replayed."""
        used = set(adapters) or {None}
        if self._fused is None or self.graphs is None or len(used) > 1:
            return None
        (adapter,) = used
        hidden = self.graphs.hidden(tokens, places, adapter, positions)
        return None if hidden is None else self._fused.head(hidden)

    def _keep_routes(self, routers: Routers, routing: Routing, rows: list[int], positions: list[int]) -> None:
        """Store the experts of the step's N tokens. Layers without experts have zeros, as in vLLM."""
        if missing := routers.found.keys() - routing.chosen.keys():
            kind = type(routers.found[min(missing)]).__name__
            raise EngineError(f"enable_return_routed_experts: {kind} does not choose with topk, which is not supported")
        layers = self.model.config.get_text_config().num_hidden_layers
        dtype = torch.uint8 if routers.num_experts <= 256 else torch.int16
        chosen_NLk = torch.zeros(len(rows), layers, routers.top_k, dtype=dtype, device=self.device)
        for layer, chosen_Nk in routing.chosen.items():
            chosen_NLk[:, layer] = chosen_Nk
        self.slots.write_routes(on_device(rows, self.device), on_device(positions, self.device), chosen_NLk)

    def routes_of(self, row: int, length: int) -> np.ndarray | None:
        """The experts [length, layers, k] of the first tokens in a slot row, uint8 or uint16; None if none are kept."""
        if self.slots.routes is None or self.routers is None:
            return None
        # A copy: the row belongs to another sequence soon, and threads that answer read this later.
        stored = self.slots.routes[row, 0, :length].cpu().numpy().copy()
        return stored.view(np.uint16 if stored.dtype == np.int16 else np.uint8).reshape(length, -1, self.routers.top_k)

    def _common_start(self, origins: SequenceOf[Origin | None]) -> CommonStart | None:
        """The shared-prefix groups of the running sequences, rebuilt only when the sequences change."""
        if origins != self._origins:
            self._origins = list(origins)
            found = [origin for origin in origins if origin is not None]
            self._shared = self._find_common_start(found, self.device) if len(found) == len(origins) else None
        return self._shared

    def _logits(self, step: SlotStep, tokens: Tokens, wanted: list[int]) -> Callable[[slice], Tensor]:
        """A function that computes logits [W, V] of a part of the indices `wanted` of the N tokens.

        Transformers' own forward pass computes all of them at once.
        """
        token_ids, images = on_device(tokens.ids, self.device), tokens.images
        position_ids = on_device(tokens.positions, self.device)
        wanted_index = on_device(wanted, self.device)
        if self._fused is not None:
            decoder, hidden = self._fused, self._fused.hidden(step, token_ids, position_ids, images)[wanted_index]
            return lambda part: decoder.head(hidden[part])
        self._hooks.current = step.adapters
        given = {"input_ids": token_ids[None]}
        if images is not None:
            embeddings = self.model.get_input_embeddings()(token_ids)
            embeddings[images.places_F] = images.features.values_FH
            given = {"inputs_embeds": embeddings[None]}
        output = self.model(
            **given,
            position_ids=position_ids[None],
            use_cache=False,
            logits_to_keep=wanted_index,
            slot_step=step,
        )
        logits: Tensor = output.logits[0]
        return lambda part: logits[part]

    def _warm_up(self) -> None:
        """Run one prefill and one decode step, to allocate the slots and to check that the model is supported."""
        text = self.model.config.get_text_config()
        layers = list(getattr(text, "layer_types", None) or [])
        decoded = DECODED_LAYERS | STATE_LAYERS if self.state_layers else DECODED_LAYERS
        if others := sorted(set(layers) - decoded):
            raise EngineError(f"the model has layers of type {', '.join(others)}, which are not supported")
        if any(getattr(layer, "time_step_limit", (0,))[0] > 0 for layer in self.state_layers.found):
            # Transformers applies it when it reads a prompt, and not when it decodes.
            raise EngineError("the model has a least time step, which is not supported")
        # Classes of hybrids do not say that they call the attention function that is registered. The check below finds
        # out.
        if not self.model._supports_attention_backend and not self.state_layers:
            raise EngineError("the model has its own attention code, which is not supported")
        self.slots.reserve(rows=1, length=2)
        self.forward([], [[0]], [0])
        self.forward([[0, 0]], [], [])
        without_cache = sum(kind in ("mlp", "moe") for kind in layers)
        if self.slots.num_layers != text.num_hidden_layers - without_cache:
            raise EngineError("the model has layers without a key-value cache, which are not supported")
        check_slots(self.model, self.forward, keeps_prefixes=not self.state_layers)


def _in_parts(logits_at: Callable[[slice], Tensor], start: int, end: int) -> Iterator[Tensor]:
    for at in range(start, end, TOKENS_AT_ONCE):
        yield logits_at(slice(at, min(at + TOKENS_AT_ONCE, end)))


def load_model(
    name: str, dtype: str, device: torch.device, trust_remote_code: bool = False, max_model_len: int | None = None
) -> tuple[PreTrainedModel, Path]:
    """Load a model for generation, and return it with the directory of its weights.

    `dtype` "auto" is float32 on a CPU, where bfloat16 log-probabilities are noisy, and bfloat16 elsewhere.
    Length-dependent rotary frequencies are those of `max_model_len` tokens; None takes the model's context length.

    Raises:
        EngineError: the model cannot be loaded; the message contains the first line of the library's error.
        EngineError: the engine cannot run the model.
    """
    register_slot_attention()
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch_dtype = auto if dtype == "auto" else getattr(torch, dtype)
    options = {
        "dtype": torch_dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        description = ModelDescription(config.to_dict())
        is_part = description.has_known_language_part
        if description.setting("quantization_config") and description.packed is None:
            # Transformers decorates `to`, which hides from type checkers that it is a method.
            model = _quantized(name, options, is_part=is_part).to(device)  # type: ignore[arg-type]
        else:
            with torch.device("meta"):
                of_model = language_config(config) if is_part else config
                model = AutoModelForCausalLM.from_config(of_model, **options)
            plan = find_weights(model, name, torch_dtype, Alone(device), is_part=is_part)
            in_float32 = float32_names(model, torch_dtype)
            compute_buffers(model, in_float32)
            allocate(model, device, in_float32)
            fill(model, plan, None, unchanged)
        directory = Path(str(cached_file(name, "config.json"))).parent
    except KeyError as exc:
        raise EngineError("the model has its own attention code, which is not supported") from exc
    except (OSError, ValueError, ImportError, SafetensorError, StartFault) as exc:
        raise EngineError(f"cannot load model {name!r}: {first_line(exc)}") from exc
    model = model.requires_grad_(False).eval()
    length = max_model_len or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is not None:
        fix_rotary_lengths(model, length)
        check_positions(model, length)
    return model, directory


def tower_of(model: PreTrainedModel, family: Family) -> Tower:
    """The vision tower of the checkpoint whose language part `model` is.

    Raises:
        EngineError: its files have none.
    """
    part = part_of(model)
    assert part is not None, "it has been loaded as a part"
    try:
        files = Checkpoint.open(sorted(part.folder.glob("*.safetensors")))
        return load_tower(AutoConfig.from_pretrained(part.folder), family, files.tensors, model.dtype, model.device)
    except (OSError, ValueError, SafetensorError, StartFault) as exc:
        raise EngineError(f"cannot load the vision tower of {str(part.folder)!r}: {first_line(exc)}") from exc


def _quantized(name: str, options: Mapping[str, Any], *, is_part: bool) -> PreTrainedModel:
    """A model with quantized weights, which only Transformers' own loading reads.

    Raises:
        StartFault: it is a part of a checkpoint, or its files lack a weight.
    """
    if is_part:
        raise StartFault("quantized weights of a language part are not supported")
    loaded: object = AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    # Transformers annotates only the model.
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)
    if fault := loading_fault(report):
        raise StartFault(fault)
    return model


def model_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load only the model's config.

    Raises:
        EngineError: there is no model with that name.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as exc:
        raise EngineError(f"cannot load model {name!r}: {first_line(exc)}") from exc
