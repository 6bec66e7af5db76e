"""Default loss: matches the reference values, and its gradient is that of a weighted log-likelihood."""

from __future__ import annotations

import pytest
import torch

from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig
from prime_rl.trainer.rl.loss import (
    LossInputs,
    RowLosses,
    TrainerError,
    default_losses,
    setup_loss,
    split_inputs,
    tokens_of,
)
from prime_rl.trainer.rl.rows import RowLayout, sequence_lengths

CPU = torch.device("cpu")

TEACHER = [-2.0, -0.8, -0.7, -1.5, -0.1]


def reference_inputs(teacher: list[float] | None = None) -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor([-3.0, -1.0, -0.5, -2.0, -0.2], requires_grad=True),
        inference_logprobs=torch.tensor([0.0, -1.2, -0.4, -5.0, -0.3]),
        teacher_logprobs=None if teacher is None else torch.tensor(teacher),
        advantages=torch.full((5,), 0.5),
        loss_mask=torch.tensor([False, True, True, True, True]),
    )


def layout_of(inputs: LossInputs, lengths: list[int] | None = None) -> RowLayout:
    return RowLayout.of_mask(inputs.loss_mask, lengths or [len(inputs.loss_mask)], CPU)


def default_loss(inputs: LossInputs, config: DefaultLossConfig, lengths: list[int] | None = None) -> RowLosses:
    return default_losses(tokens_of(inputs, layout_of(inputs, lengths)), config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.947428),
        ({"ratio_type": "sequence"}, 2.125),
        ({"kl_tau": 0.1}, 0.925314),
        ({"token_mask_high": 100}, 21.032965),
        ({"ratio_type": "sequence", "token_mask_high": 100}, 4.625),
    ],
)
def test_loss_of_the_reference_sequence(settings, expected) -> None:
    outputs = default_loss(reference_inputs(), DefaultLossConfig(**settings))
    assert outputs.losses_S.item() == pytest.approx(expected, abs=2e-6)


def test_loss_with_a_teacher() -> None:
    outputs = default_loss(reference_inputs(TEACHER), DefaultLossConfig(teacher_tau=0.5, token_mask_high=100))
    assert outputs.losses_S.item() == pytest.approx(31.163683, abs=2e-5)
    assert outputs.metrics["teacher_kl"].item() == pytest.approx(0.15, abs=1e-6)


def test_metrics_of_the_reference_sequence() -> None:
    metrics = default_loss(reference_inputs(), DefaultLossConfig()).metrics
    assert metrics["mismatch_kl"].item() == pytest.approx(4.029237, abs=2e-6)
    assert metrics["masked_mismatch_kl"].item() == pytest.approx(16.085537, abs=2e-6)
    assert metrics["unmasked_mismatch_kl"].item() == pytest.approx(0.010470, abs=1e-6)
    assert metrics["geo_seq_ratio"].item() == pytest.approx(2.225541, abs=2e-6)
    assert metrics["is_masked"].tolist() == [0, 0, 1, 0]
    assert metrics["is_masked_high"].tolist() == [0, 0, 1, 0]
    assert metrics["is_masked_low"].tolist() == [0, 0, 0, 0]


def test_gradient_is_the_detached_weight_of_each_kept_token() -> None:
    inputs = reference_inputs()
    default_loss(inputs, DefaultLossConfig(kl_tau=0.1)).losses_S.sum().backward()
    difference = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
    weight = difference.exp() * (0.5 - 0.1 * difference)
    keep = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    assert torch.allclose(inputs.trainer_logprobs.grad, -weight * keep)


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"geo_mask_high": 2.0}, "geo_masked_high"),
        ({"geo_mask_low": 3.0}, "geo_masked_low"),
        ({"sequence_mask_high": 20.0}, "sequence_masked_high"),
        ({"sequence_mask_low": 0.95}, "sequence_masked_low"),
    ],
)
def test_a_sequence_mask_drops_every_token(settings, metric) -> None:
    outputs = default_loss(reference_inputs(), DefaultLossConfig(**settings))
    assert outputs.losses_S.item() == 0
    assert outputs.metrics[metric].item() == 1
    assert outputs.metrics["is_masked"].mean().item() == 1


def test_an_infinite_ratio_is_dropped_and_leaves_no_nan() -> None:
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([-1.0, -1.0], requires_grad=True),
        inference_logprobs=torch.tensor([-200.0, -1.0]),
        teacher_logprobs=None,
        advantages=torch.ones(2),
        loss_mask=torch.tensor([True, True]),
    )
    outputs = default_loss(inputs, DefaultLossConfig(geo_mask_high=1e300, sequence_mask_high=1e300))
    outputs.losses_S.sum().backward()
    assert outputs.metrics["is_masked"].tolist() == [1, 0]
    assert inputs.trainer_logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 0, 1, 0], [3, 3]),
        ([0, 0, 1], [3]),
        ([0, 1, 2, 0], [4]),
        ([0, 1, 0, 1, 2, 0, 1], [2, 3, 2]),
        ([0], [1]),
    ],
)
def test_sequences_are_found_from_their_positions(positions, lengths) -> None:
    assert sequence_lengths(torch.tensor(positions)) == lengths


def packed_twice(inputs: LossInputs) -> LossInputs:
    logprobs = inputs.trainer_logprobs.detach()
    return LossInputs(
        torch.cat([logprobs, logprobs]).requires_grad_(),
        inputs.inference_logprobs.repeat(2),
        None,
        inputs.advantages.repeat(2),
        inputs.loss_mask.repeat(2),
    )


def test_a_packed_row_splits_into_its_sequences() -> None:
    first, second = split_inputs(packed_twice(reference_inputs()), [5, 5])
    assert torch.equal(first.trainer_logprobs, second.trainer_logprobs)
    assert second.loss_mask.tolist() == [False, True, True, True, True]
    assert second.teacher_logprobs is None


@pytest.mark.parametrize("ratio_type", ["token", "sequence"])
def test_sequences_of_a_row_have_the_losses_metrics_and_gradients_that_they_have_alone(ratio_type) -> None:
    """With trust regions that treat sequences and their tokens differently, and a sequence without trained tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = [7, 1, 12, 3, 9]
    logprobs, behaviour, teacher = (-2 * torch.rand(sum(lengths), generator=generator) for _ in range(3))
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    mask[8:20] = False
    config = DefaultLossConfig(
        ratio_type=ratio_type,
        kl_tau=0.1,
        teacher_tau=0.3,
        token_mask_high=3.0,
        geo_mask_high=1.2,
        sequence_mask_low=0.2,
    )
    advantages = torch.repeat_interleave(torch.tensor([1.0, -1.0, 2.0, 0.5, -0.3]), torch.tensor(lengths))
    row = LossInputs(logprobs.clone().requires_grad_(), behaviour, teacher, advantages, mask)
    together = default_loss(row, config, lengths)
    together.losses_S.sum().backward()
    alone = [LossInputs(logprobs.clone().requires_grad_(), behaviour, teacher, advantages, mask)]
    parts = [part for part in split_inputs(alone[0], lengths) if part.loss_mask.any()]
    losses = [default_loss(part, config) for part in parts]
    torch.stack([each.losses_S.sum() for each in losses]).sum().backward()
    assert len(together.losses_S) == len(parts) < len(lengths)
    torch.testing.assert_close(together.losses_S, torch.cat([each.losses_S for each in losses]))
    torch.testing.assert_close(row.trainer_logprobs.grad, alone[0].trainer_logprobs.grad)
    for name, values in together.metrics.items():
        torch.testing.assert_close(values, torch.cat([each.metrics[name] for each in losses]), msg=name)
    assert 0 < together.metrics["is_masked"].mean() < 1


@pytest.mark.parametrize(("ratio_type", "per_token"), [("token", True), ("sequence", False)])
def test_the_sum_is_divided_by_tokens_or_by_sequences(ratio_type, per_token) -> None:
    assert setup_loss(DefaultLossConfig(ratio_type=ratio_type)).per_token is per_token


def test_a_custom_loss_is_imported_and_called_per_sequence(monkeypatch, tmp_path) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(
        "from prime_rl.trainer.rl.loss import LossOutputs\n"
        "def reinforce(inputs, scale):\n"
        "    return LossOutputs(-scale * inputs.trainer_logprobs[inputs.loss_mask].sum(), {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = CustomLossConfig(type="custom", import_path="losses_of_a_user.reinforce", kwargs={"scale": 2.0})
    inputs = packed_twice(reference_inputs())
    outputs = setup_loss(config).row_losses(inputs, layout_of(inputs, [5, 5]))
    assert outputs.losses_S.tolist() == pytest.approx([2 * 3.7] * 2)
    assert outputs.metrics["mismatch_kl"].tolist() == pytest.approx([4.029237] * 2, abs=2e-6)


@pytest.mark.parametrize("path", ["no_such_module.f", "math.no_such_name", "math.pi"])
def test_a_custom_loss_that_cannot_be_imported_is_named(path) -> None:
    with pytest.raises(TrainerError, match=f"loss.import_path.*{path}"):
        setup_loss(CustomLossConfig(type="custom", import_path=path))


def test_a_custom_loss_with_a_parameter_stats_records_masked_statistics(monkeypatch, tmp_path) -> None:
    (tmp_path / "losses_that_record.py").write_text(
        "from prime_rl.trainer.rl.loss import LossOutputs\n"
        "def reinforce(inputs, stats):\n"
        "    stats.denominator(tokens=inputs.loss_mask)\n"
        "    with stats.scope('policy'):\n"
        "        stats.stat('tokens', 'avg', logprob=inputs.trainer_logprobs)\n"
        "    return LossOutputs(-inputs.trainer_logprobs[inputs.loss_mask].sum())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loss = setup_loss(CustomLossConfig(type="custom", import_path="losses_that_record.reinforce"))
    for _ in range(2):
        loss.row_losses(reference_inputs(), layout_of(reference_inputs()))
    assert loss.stats is not None
    assert loss.stats.export() == pytest.approx({"tokens": 8, "policy/logprob": (-1.0 - 0.5 - 2.0 - 0.2) / 4})
