"""Loads a tokenizer. Without torch, so that a preflight does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AddedToken, AutoConfig, AutoTokenizer, dynamic_module_utils

from prime_rl.checks.chat_templates import read_template
from prime_rl.checks.model_files import embeddings_fault
from prime_rl.checks.start_dir import looks_like_path
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig
from prime_rl.trainer.process.errors import ModelError
from prime_rl.utils.errors import StartFault
from prime_rl.utils.files import locked_file
from prime_rl.utils.model_lengths import ids_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def setup_tokenizer(config: TokenizerConfig, model_config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `config.name` (None means the model's), and add the tokens and the template of `config`.

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
        raise ModelError(load_error(key, name, error)) from error
    # Not special: decoding keeps them, so that rewards and readers see them.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in config.add_tokens])
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = read_template("tokenizer.chat_template", config.chat_template)
        except StartFault as fault:
            raise ModelError(str(fault)) from fault
    return tokenizer


def embeddings_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many embeddings a model needs for all ids. Added tokens may leave gaps between those in use."""
    return max(tokenizer.get_vocab().values()) + 1


def embeddings_held(config: ModelConfig, tokens: TokenizerConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids, from 0 on, have an embedding in the model of a run.

    Raises:
        ModelError: there is no model config at `config.name`.
    """
    if tokens.add_tokens:  # the model gets as many
        return embeddings_needed(tokenizer)
    try:
        with loading_code(config.trust_remote_code):
            found = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(load_error("model.name", config.name, error)) from error
    return ids_read(found.get_text_config())


def check_embeddings(config: ModelConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that `model`, that of `config`, has an embedding for each token of texts.

    Special tokens may lie beyond, as the one for images does in Gemma 3's models for text: rows that hold one are bad.

    Raises:
        ModelError: the tokenizer has more tokens.
    """
    held = ids_read(model.config.get_text_config())
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    needed = max(number for number in tokenizer.get_vocab().values() if number not in special) + 1
    if fault := embeddings_fault(config.name, held, needed):
        raise ModelError(fault)


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


def load_error(key: str, name: str, error: Exception) -> str:
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


def check_tokenizer(key: str, name: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model `name`, the value of `key`, reads the same tokens as the trained `model`. It may have more.

    Raises:
        ModelError: a token has another id in its tokenizer.
    """
    theirs = setup_tokenizer(TokenizerConfig(), model.model_copy(update={"name": name})).get_vocab()
    wrong = next((token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number), None)
    if wrong is not None:
        raise ModelError(
            f"{key} = {name}: its tokenizer has another id for {wrong!r} than that of {model.name}: both must read the "
            "same tokens"
        )
