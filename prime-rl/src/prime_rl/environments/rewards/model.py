"""Rewards of a reward model, `fn = "model:PATH"`: Transformers' class for sequence classification with one label.

The model runs in a worker process of its own, which all environments of a process share. `RewardModel` collects the
rollouts that wait while it computes, and sends them together.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.pool import RewardError, RewardPool, shared_pool
from prime_rl.environments.rewards.registry import RewardFault, model_fault

SCORES = f"{__name__}:scores"
_MOST_WAITING = 256
"""Conversations in one request to the worker."""
_BATCH_TOKENS = 8192
"""Tokens, with padding, that the model computes at once."""


class RewardModel:
    """A reward model as the environment's process sees it."""

    def __init__(self, path: str, args: Mapping[str, Any], timeout_s: float) -> None:
        """Start the worker, unless another environment has.

        Raises:
            RewardFault: an argument is unknown, or the device is none.
        """
        if unknown := args.keys() - {"device"}:
            raise RewardFault(f"model:{path}: unknown argument {sorted(unknown)[0]!r}; there is device")
        device = str(args.get("device", "cpu"))
        if not re.fullmatch(r"cpu|cuda:\d+", device):
            raise RewardFault(f"model:{path}: device must be 'cpu' or such as 'cuda:3', got {device!r}")
        # Of all GPUs, the worker sees one: its own process may see none.
        gpu = device.partition(":")[2]
        self.args = {"path": path, "device": "cuda" if gpu else "cpu"}
        self.timeout_s = timeout_s
        self.pool: RewardPool = shared_pool(1, owner=f"{path} {device}", env={"CUDA_VISIBLE_DEVICES": gpu})
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[float]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def reward(self, prompt: Any, completion: Any) -> float:
        """The reward of one rollout.

        Raises:
            RewardError: the model failed.
        """
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(({"prompt": prompt, "completion": completion}, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting[:_MOST_WAITING], self._waiting[_MOST_WAITING:]
            conversations, futures = zip(*sent, strict=True)
            args = {**self.args, "conversations": list(conversations)}
            try:
                values = await asyncio.wrap_future(self.pool.call_many(SCORES, args, self.timeout_s))
                for future, value in zip(futures, values, strict=True):
                    if not future.done():
                        future.set_result(value)
            except RewardError as error:
                _fail(futures, error)
            except BaseException as error:
                # Whatever failed: a rollout whose reward never comes would wait for ever.
                _fail([*futures, *(future for _, future in self._waiting)], error)
                self._waiting = []
                raise


def _fail(futures: Sequence[asyncio.Future[float]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


# In the worker. Torch and Transformers are imported there alone.


def scores(conversations: Sequence[Mapping[str, Any]], path: str, device: str) -> list[float]:
    """The rewards of conversations, each of which has a `prompt` and a `completion`, as text or messages."""
    import torch

    model, tokenizer = _loaded(path, device)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # Cut at the end as training cuts it.
    token_ids = [_token_ids(tokenizer, each)[:longest] for each in conversations]
    found = [0.0] * len(token_ids)
    with torch.inference_mode():
        for batch in _batches([len(each) for each in token_ids]):
            rows = [{"input_ids": token_ids[at]} for at in batch]
            inputs = tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(device)
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            for at, reward in zip(batch, logits[:, 0].float().tolist(), strict=True):
                found[at] = reward
    return found


def note(args: Mapping[str, Any]) -> str:
    """Load the model, and describe it for the log."""
    path, device = args["path"], args["device"]
    model, _ = _loaded(path, device)
    return f"Reward model: {path} ({type(model).__name__}, {model.num_parameters():,} parameters) on {device}"


@functools.cache
def _loaded(path: str, device: str) -> tuple[Any, Any]:
    """Raises RewardFault if there is no reward model at `path`."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    if fault := model_fault(path):
        raise RewardFault(fault)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # On a CPU bfloat16 is slower than float32.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RewardFault(f"model:{path}: {reason}") from error
    if (labels := model.config.num_labels) != 1:
        raise RewardFault(f"model:{path}: a classifier with {labels} labels, and a reward model has one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def _token_ids(tokenizer: Any, conversation: Mapping[str, Any]) -> list[int]:
    """The tokens of a conversation, as `medarc_train rm` makes them of a row of preferences."""
    prompt, completion = conversation["prompt"], conversation["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        end = tokenizer.eos_token or ""
        return list(tokenizer(text if text.endswith(end) else text + end)["input_ids"])
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion or [])
    if tokenizer.chat_template is None:
        raise RewardFault("the reward model's tokenizer has no chat template, and the rollout has messages")
    messages = [{key: value for key, value in each.items() if value is not None} for each in asked + answered]
    return list(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Divide sequences, the longest first, into batches of at most `_BATCH_TOKENS` with padding."""
    batches: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= _BATCH_TOKENS:
            batches[-1].append(at)
        else:
            batches.append([at])
    return batches


__all__ = ["SCORES", "RewardModel", "note", "scores"]
