"""Models that bring their own code (`trust_remote_code`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from prime_rl.configs.trainer import DebugModelConfig, ModelConfig, WeightCheckpointConfig
from prime_rl.trainer.checkpoints.weights import export_model
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.parallel_dims import Mesh

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_code"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    @classmethod
    def can_generate(cls):
        return False
"""
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(directory: Path, attention_dropout: float) -> ModelConfig:
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    kind = {"model_type": "own_code", "auto_map": classes, "attention_dropout": attention_dropout}
    (directory / "modeling_own.py").write_text(CODE)
    (directory / "config.json").write_text(json.dumps(kind | SIZES | HEADS))
    return ModelConfig(name=str(directory), trust_remote_code=True, debug=DebugModelConfig(random_init=True))


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies the code of models there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_its_export_has_a_generation_config_though_transformers_gives_it_none(
    tmp_path: Path, tiny_model_dir: Path, mesh: Mesh
) -> None:
    model = setup_model(config_of(tmp_path, attention_dropout=0.0), mesh)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    export_model(model, tokenizer, tmp_path / "export", WeightCheckpointConfig(), torch.float32)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == model.config.eos_token_id


def test_its_code_may_compute_gradients_in_training_mode_alone(tmp_path: Path, mesh: Mesh) -> None:
    assert setup_model(config_of(tmp_path, attention_dropout=0.0), mesh).training


def test_dropout_that_cannot_be_left_out_is_refused_in_rl_and_trained_in_sft(tmp_path: Path, mesh: Mesh) -> None:
    config = config_of(tmp_path, attention_dropout=0.3)
    with pytest.raises(ModelError, match="OwnForCausalLM"):
        setup_model(config, mesh)
    assert setup_model(config, mesh, has_dropout=True).training


# Fails if two processes are importing it at once.
LONG_CODE = """
import os
from pathlib import Path

mark = Path(os.environ["MARK_OF_AN_IMPORT"])
mark.touch(exist_ok=False)
sum(range(20_000_000))
mark.unlink()
"""


def test_ranks_load_it_one_after_the_other(tmp_path: Path) -> None:
    config = config_of(tmp_path, attention_dropout=0.0)
    (tmp_path / "modeling_own.py").write_text(LONG_CODE + CODE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("own_code_of_a_launch.py")
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "MARK_OF_AN_IMPORT": str(tmp_path / "mark")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script, config.name], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["OwnForCausalLM"] * 2
