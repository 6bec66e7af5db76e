"""Parts of a Transformers model that depend on a sequence's length or order: rotary frequencies, attention windows, and
layers that carry a state from token to token.

Trainer and inference engine both prepare their models here. Nothing heavy is imported: models are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_FIXED = "fixed_length"
"""A rotary type that Transformers does not know, so its forward pass leaves the frequencies as they are."""

_TIGHT = {
    **{"sliding_window": 4, "window_size": 4, "attention_chunk_size": 4, "attn_logit_softcapping": 1.0},
    # Llama 4 scales the queries of tokens after each so many.
    "floor_scale": 4,
}
"""Limits on attention that a probe of a few tokens reaches."""


def fix_rotary_lengths(model: Any, length: int) -> None:
    """Fix length-dependent rotary frequencies (longrope, dynamic NTK) to those of a sequence of `length` tokens.

    Transformers chooses them by the largest position of a forward pass. A token's log-probability would then depend on
    its neighbours in a packed row or batch, and on whether it was computed before or after a sequence became long.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type in [name for name, kind in kinds.items() if _depends_on_length(kind)]:
                _choose_frequencies(module, length, layer_type=layer_type)
                kinds[layer_type] = _FIXED
        elif _depends_on_length(kinds):
            _choose_frequencies(module, length)
            module.rope_type = _FIXED


def ids_read(text: Any) -> int:
    """How many ids, from 0 on, the language model of a config reads.

    Gemma 3n's layers have no embeddings for the tokens of images.
    """
    of_layers: int | None = getattr(text, "vocab_size_per_layer_input", None)
    held: int = text.vocab_size
    return min(held, of_layers or held)


@contextmanager
def tightened(model: Any) -> Iterator[None]:
    """Shorten the windows of a model to 4 tokens and lower its caps on attention scores to 1 in the block.

    A probe of a few tokens then shows whether they are respected.
    """
    owners = [model.config, *model.modules()]
    found = [(vars(owner), name) for owner in owners for name in _TIGHT if _is_limit(vars(owner).get(name))]
    original = [owner[name] for owner, name in found]
    for owner, name in found:
        owner[name] = _TIGHT[name]
    try:
        yield
    finally:
        for (owner, name), value in zip(found, original, strict=True):
            owner[name] = value


def state_layers(model: Any) -> list[Any]:
    """The layers of a hybrid model that carry a state from token to token: gated delta rules, state spaces (Mamba), and
    short convolutions.

    Each of them starts with a causal convolution, which no attention layer of Transformers has.
    """
    return [module for module in model.modules() if hasattr(module, "layer_idx") and _has_convolution(module)]


def bypassed_layers(model: Any, forward: Callable[[], object]) -> list[str]:
    """Paths of the linear layers inside `state_layers` that `forward`, a pass of the model, does not call.

    Their owner reads their weight alone, as Mamba's of `dt_proj`. An adapter is added by a hook on the layer, which
    then never runs.
    """
    owners = set(map(id, state_layers(model)))
    waiting = {
        f"{path}.{name}": child
        for path, owner in model.named_modules()
        if id(owner) in owners
        for name, child in owner.named_modules()
        if any(base.__name__ == "Linear" for base in type(child).__mro__)
    }
    called: set[str] = set()
    hooks = [
        layer.register_forward_hook(lambda *_, path=path: called.add(path))  # returns None: the output stays
        for path, layer in waiting.items()
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [path for path in waiting if path not in called]


def _has_convolution(module: Any) -> bool:
    return any(base.__name__ == "Conv1d" for child in module.children() for base in type(child).__mro__)


def _depends_on_length(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _choose_frequencies(module: Any, length: int, **layer_type: str) -> None:
    """Have Transformers choose the frequencies for the last token of a sequence of `length` tokens."""
    frequencies = getattr(module, "_".join([*layer_type.values(), "inv_freq"]))
    # On the meta device there are no values: they come from another process.
    if not frequencies.is_meta:
        module(frequencies, frequencies.new_full((1, 1), length - 1).long(), **layer_type)


def _is_limit(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
