"""Rewards of a reward model, `fn = "model:PATH"`: Transformers' class for sequence classification with one label.

The model runs in a worker process of its own, which all environments of a process share. `RewardModel` collects the
rollouts that wait while it computes, and sends them together.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.pool import RewardError, RewardPool, RewardTimeout, WorkerEnded, shared_pool
from prime_rl.environments.rewards.registry import RewardFault, model_fault
from prime_rl.utils.conversations import plain_messages
from prime_rl.utils.errors import one_line

SCORES = f"{__name__}:scores"
_MOST_WAITING = 256
"""Conversations in one request to the worker."""
_BATCH_TOKENS = 8192
"""Tokens, with padding, that the model computes at once."""

_Waiting = tuple[dict[str, Any], asyncio.Future[float]]
"""A conversation, and where its reward goes."""


class RewardModel:
    """A reward model as the environment's process sees it."""

    def __init__(self, path: str, args: Mapping[str, Any], timeout_s: float) -> None:
        """Start the worker, unless another environment has. `args` are those that `resolve` has checked."""
        device = str(args.get("device", "cpu"))
        # Of all GPUs, the worker sees one: its own process may see none.
        gpu = device.partition(":")[2]
        self.args = {"path": path, "device": "cuda" if gpu else "cpu"}
        self.timeout_s = timeout_s
        self.pool: RewardPool = shared_pool(1, owner=f"{path} {device}", env={"CUDA_VISIBLE_DEVICES": gpu})
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def reward(self, prompt: Any, completion: Any, state: Mapping[str, Any]) -> float:
        """The reward of one rollout. `state` has the tools that the policy was offered.

        Raises:
            RewardError: the model failed.
        """
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        tools = list(state.get("tool_defs") or ())
        self._waiting.append(({"prompt": prompt, "completion": completion, "tools": tools}, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting[:_MOST_WAITING], self._waiting[_MOST_WAITING:]
            try:
                await self._score(sent)
            except BaseException as error:
                # Whatever failed: a rollout whose reward never comes would wait for ever.
                _fail([*sent, *self._waiting], error)
                self._waiting = []
                raise

    async def _score(self, sent: Sequence[_Waiting]) -> None:
        """Score conversations. If that fails, score their halves, so that only those that fail alone have an error."""
        args = {**self.args, "conversations": [conversation for conversation, _ in sent]}
        try:
            values = await asyncio.wrap_future(self.pool.call_many(SCORES, args, self.timeout_s))
        except RewardError as error:
            # After these two, another try may take minutes: up to the time limit, or to load the model again.
            if len(sent) == 1 or isinstance(error, RewardTimeout | WorkerEnded):
                _fail(sent, error)
                return
            middle = len(sent) // 2
            for half in (sent[:middle], sent[middle:]):
                await self._score(half)
            return
        for (_, future), value in zip(sent, values, strict=True):
            if not future.done():
                future.set_result(value)


def _fail(waiting: Sequence[_Waiting], error: BaseException) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_exception(error)


# In the worker. Torch and Transformers are imported there alone.


def scores(conversations: Sequence[Mapping[str, Any]], path: str, device: str) -> list[float]:
    """The rewards of conversations: each has a `prompt` and a `completion`, as text or messages, and maybe `tools`."""
    import torch

    model, tokenizer = _loaded(path, device)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # Cut at the end as training cuts it.
    token_ids = [token_ids_of(tokenizer, each)[:longest] for each in conversations]
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


def token_ids_of(tokenizer: Any, conversation: Mapping[str, Any]) -> list[int]:
    """The tokens of a conversation, as `medarc_train rm` makes them of a row of preferences.

    Raises:
        RewardFault: there is no chat template, or it refuses the messages.
    """
    prompt, completion = conversation["prompt"], conversation["completion"]
    if isinstance(prompt, list) and prompt and all(message.get("role") == "text" for message in prompt):
        # Verifiers' form of a plain text and its continuation.
        prompt, completion = (
            each if isinstance(each, str) else "".join(str(message.get("content") or "") for message in each or ())
            for each in (prompt, completion)
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        is_begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        return _ended(tokenizer, text, tokenizer(text, add_special_tokens=not is_begun)["input_ids"])
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion or [])
    template = tokenizer.chat_template
    if template is None:
        raise RewardFault("the reward model's tokenizer has no chat template, and the rollout has messages")
    messages = plain_messages(
        [_with_openai_calls(each) for each in asked + answered], template if isinstance(template, str) else None
    )
    schemas = (
        {key: value for key, value in tool.items() if value is not None} for tool in conversation.get("tools") or ()
    )
    tools = [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
    except Exception as error:
        raise RewardFault(f"the chat template refuses the conversation: {one_line(error)}") from error
    # The chat template has already written the special tokens.
    return _ended(tokenizer, text, tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_openai_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have OpenAI's form. Those of verifiers lack the object `function`."""
    calls = message.get("tool_calls") or ()
    function = ("name", "arguments")
    found = [
        call
        if "function" in call
        else {"type": "function", "id": call.get("id"), "function": {key: call.get(key) for key in function}}
        for call in calls
    ]
    return {**message, "tool_calls": found or None}


def _ended(tokenizer: Any, text: str, token_ids: Sequence[int]) -> list[int]:
    """The tokens of a text, with an end token unless the text or its tokens end with a special one."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends_by_itself = text.rstrip().endswith((*special, *tokenizer.all_special_tokens))
    end = tokenizer.eos_token_id
    needs_none = ends_by_itself or end is None or list(token_ids[-1:]) == [end]
    return list(token_ids) if needs_none else [*token_ids, end]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Divide sequences, the longest first, into batches of at most `_BATCH_TOKENS` with padding."""
    batches: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= _BATCH_TOKENS:
            batches[-1].append(at)
        else:
            batches.append([at])
    return batches


__all__ = ["SCORES", "RewardModel", "note", "scores", "token_ids_of"]
