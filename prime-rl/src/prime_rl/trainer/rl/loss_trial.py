"""Calls a custom loss once on made-up tensors, so that a mistake in it shows before a model is loaded.

A run's trainer does this at its start. By itself, `python -m prime_rl.trainer.rl.loss_trial @ trainer.toml` prints the
fault: a dry run and the checks of a batch job start it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from prime_rl.configs.algorithms import CustomLossConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs, custom_function
from prime_rl.utils.errors import one_line
from prime_rl.utils.imports import place_of
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program

_SHAPES = ((6, 3), (3, 1))
"""Tokens of each made-up sequence, and how many of them are trained. An answer may have a single token, of which a
standard deviation is NaN."""


def try_loss(config: CustomLossConfig, device: torch.device, has_reference: bool = False) -> None:
    """Call the loss on sequences like those of a run, and take its gradient.

    Raises:
        TrainerError: it cannot be imported or called, or returns what cannot be trained on.
    """
    function, _ = custom_function(config)
    key = f"trainer.loss.import_path = {config.import_path!r}"
    for number, (length, trained) in enumerate(_SHAPES):
        inputs = _made_up(length, trained, 1.0 - 1.5 * number, device, has_reference)
        try:
            # With gradients, whatever the caller has switched off.
            with torch.enable_grad():
                outputs = function(inputs)
        except (Exception, SystemExit) as error:
            if "CUDA" in str(error) and not torch.cuda.is_available():
                return  # it asks for a GPU, which a dry run does not use
            tried = f"called on {length} tokens, it raised {one_line(error)}{place_of(error)}"
            raise TrainerError(f"{key}: {tried}") from error
        for fault in _faults_of(outputs, inputs):
            raise TrainerError(f"{key}: {fault}")


def _made_up(length: int, trained: int, advantage: float, device: torch.device, has_reference: bool) -> LossInputs:
    """A prompt and an answer of `trained` tokens, as a row of a run has them."""
    mask = torch.arange(length, device=device) >= length - trained
    ours = torch.linspace(-2.0, -0.5, length, device=device)
    return LossInputs(
        trainer_logprobs=ours.clone().requires_grad_(),
        inference_logprobs=torch.where(mask, ours + 0.1, 0.0),
        # Given to every loss: whether a run has a teacher is not the trainer's to know.
        teacher_logprobs=torch.where(mask, ours + 0.2, 0.0),
        reference_logprobs=torch.where(mask, ours + 0.3, 0.0) if has_reference else None,
        advantages=torch.where(mask, advantage, 0.0),
        loss_mask=mask,
    )


def _faults_of(outputs: object, inputs: LossInputs) -> Iterator[str]:
    """What keeps outputs from being trained on; the first one counts."""
    loss, metrics = getattr(outputs, "loss", None), getattr(outputs, "metrics", {})
    if not isinstance(loss, Tensor):
        found = f"an object whose `loss` is a {type(loss).__name__}" if hasattr(outputs, "loss") else _kind(outputs)
        yield f"it returned {found}: return {LossOutputs.__name__}(loss), where loss is a tensor with one number"
        return
    if loss.numel() != 1:
        yield f"its loss has the shape {list(loss.shape)}, not one number: sum it over `inputs.loss_mask`"
        return
    if not loss.requires_grad:
        yield "its loss has no gradient: compute it from `inputs.trainer_logprobs`, without detach() or item()"
        return
    (gradient,) = torch.autograd.grad(loss.reshape(()), inputs.trainer_logprobs, allow_unused=True)
    if gradient is None:
        yield "its loss does not depend on `inputs.trainer_logprobs`, so it would train nothing"
        return
    trained = int(inputs.loss_mask.sum())
    for name, value in (("loss", loss), ("gradient", gradient)):
        if not value.isfinite().all():
            shown = float("nan") if value.isnan().any() else float("inf")
            yield f"its {name} is {shown} for a sequence with {trained} trained tokens"
            return
    if gradient[~inputs.loss_mask].any():
        get_logger().warning(
            "The custom loss also trains tokens outside of `inputs.loss_mask`, such as those of the prompt"
        )
    if not isinstance(metrics, Mapping):
        yield f"its metrics are {_kind(metrics)}, not a dict of tensors"
        return
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            yield f"its metric {name!r} is {_kind(value)}, not a tensor: write torch.tensor(value)"
            return


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def main() -> None:
    """Try the loss of a trainer's config. Exit codes: 0 it can be trained with, 1 it cannot, 2 bad config."""
    start_program()
    config = parse_argv_or_exit(TrainerConfig)
    setup_logger("warning")
    if config.loss.type != "custom":
        return
    try:
        try_loss(config.loss, torch.device("cpu"), config.reference is not None)
    except TrainerError as fault:
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(1) from fault


if __name__ == "__main__":
    main()
