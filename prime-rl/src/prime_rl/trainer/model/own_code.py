"""The code that a model or a tokenizer brings with it (`trust_remote_code`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, dynamic_module_utils

from prime_rl.utils.files import locked_file


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
