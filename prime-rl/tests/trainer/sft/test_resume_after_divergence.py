"""If the loss is NaN, the run names the rows, saves its state, and stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GraniteConfig, GraniteForCausalLM

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.sft.run import run

_POISON = "@"


@pytest.fixture
def poisoned_model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose weights are finite and whose states overflow where a text has the poison."""
    directory = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    config = GraniteConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GraniteForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(_POISON)] = 3e38
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_a_nan_loss_names_the_rows_saves_and_stops(poisoned_model_dir: Path, tmp_path: Path, capsys) -> None:
    rows = [{"prompt": "a", "completion": 40 * (_POISON if index == 4 else "b")} for index in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTConfig(
        device="cpu",
        model={"name": str(poisoned_model_dir), "attn": "sdpa"},
        data={"name": str(file), "seq_len": 32, "batch_size": 2, "shuffle": False, "pack_function": "cat"},
        ckpt={"weights": None},
        max_steps=8,
        output_dir=tmp_path / "out",
    )
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
    with pytest.raises(SystemExit):
        run(config.model_copy(update={"ckpt": CheckpointConfig(weights=None, resume_step=2)}))
    # The resumed run starts with the rows of the step that failed.
    assert "step 2: loss nan" in capsys.readouterr().out
