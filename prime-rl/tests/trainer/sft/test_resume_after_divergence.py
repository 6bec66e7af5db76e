"""A loss that is no number: the run names the rows, keeps its state, and stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.model.build import setup_tokenizer
from prime_rl.trainer.sft import step
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.run import run

_POISON = "@"


def test_a_loss_that_is_no_number_names_the_rows_saves_and_stops(
    tiny_model_dir: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a", "completion": 40 * (_POISON if index == 4 else "b")} for index in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTConfig(
        device="cpu",
        model={"name": str(tiny_model_dir), "attn": "sdpa"},
        data={"name": str(file), "seq_len": 32, "batch_size": 2, "shuffle": False},
        ckpt={"weights": None},
        max_steps=8,
        output_dir=tmp_path / "out",
    )
    healthy = step.row_loss_sum
    poison_id = setup_tokenizer(config.tokenizer, config.model).convert_tokens_to_ids(_POISON)

    def row_loss_sum(model, row: PackedRow, device) -> Tensor:
        factor = float("nan") if poison_id in row.input_ids else 1.0
        return factor * healthy(model, row, device)

    monkeypatch.setattr(step, "row_loss_sum", row_loss_sum)
    with pytest.raises(SystemExit):
        run(config)
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "ERROR" in line)
    assert "step 2: loss nan" in line
    assert "rows.jsonl:5, " in line
    assert line.endswith("rows.jsonl:6")
    assert "rows.jsonl:4" not in line
    assert "Traceback" not in out
    assert stable_steps(RunPaths(config.output_dir).checkpoints) == [2]
