"""What the engine's tests share: a model small enough to train in a test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

import prime_rl  # noqa: F401 - before any test imports torch: it decides how torch's threads wait
from prime_rl.launch.placement import reserved_ports
from prime_rl.utils.private import RUNTIME_VARIABLE

MAX_CASE_S = 30
settings.register_profile(
    "suite",
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
# pytest prime-rl/tests -k test_any_ --hypothesis-profile campaign --timeout 0
settings.register_profile("campaign", settings.get_profile("suite"), max_examples=10_000)
settings.load_profile("suite")

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests independent of how pytest was started: nohup ignores SIGHUP, and `&` in a script Ctrl-C too.

    A handler, unlike SIG_IGN, is not inherited: children get the default action, and pytest itself still survives.
    Keys and sockets are this session's own, so that two sessions of a user do not disturb each other.
    """
    if RUNTIME_VARIABLE not in os.environ:
        # Not in pytest's own folders, whose paths are too long for a socket.
        os.environ[RUNTIME_VARIABLE] = tempfile.mkdtemp(prefix="prime-rl-tests-", dir="/tmp")
        config.add_cleanup(partial(shutil.rmtree, os.environ[RUNTIME_VARIABLE], ignore_errors=True))
    # torchrun would leave a folder in /tmp.
    os.environ["PET_LOG_DIR"] = f"{os.environ[RUNTIME_VARIABLE]}/torchrun"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: None)


@contextmanager
def _limited_time() -> Iterator[None]:
    """Fail a case that takes more than 30 s of this process's time, which a property test counts as a hang."""

    def hang(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no end within {MAX_CASE_S} s")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, MAX_CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="session")
def limited_time() -> Callable[[], AbstractContextManager[None]]:
    """A block that must end within 30 s of processor time, for the cases of property tests."""
    return _limited_time


@pytest.fixture
def zmq_port() -> Iterator[int]:
    """A port for a ZMQ transport, which takes the next one as well: nobody else is given either while the test runs."""
    with ExitStack() as held:
        while True:
            (port,) = held.enter_context(reserved_ports(1))
            after = held.enter_context(socket.socket())
            after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):  # taken: try the next pair
                after.bind(("", port + 1))
                break
        yield port


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformers directory: Qwen3 with 2 layers, 4 heads, hidden size 64 and random weights (seed 0).

    Its tokenizer makes one token of each character: 4 special tokens, the newline and the 95 printable ASCII
    characters, in a vocabulary of 128. The chat template is ChatML; `<|im_end|>` ends a sequence.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("tiny_model")
    tokenizer = _char_tokenizer()
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _char_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
    printable = string.ascii_letters + string.digits + string.punctuation + " "
    vocabulary = {token: index for index, token in enumerate([*special, "\n", *printable])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<|unk|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer
