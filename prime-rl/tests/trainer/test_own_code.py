"""Models that bring their own code (`trust_remote_code`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from prime_rl.configs.trainer import DebugModelConfig, ModelConfig, TokenizerConfig, WeightCheckpointConfig
from prime_rl.trainer.checkpoints.weights import export_model
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh

CONFIG_CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_code"
"""
CODE = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    @classmethod
    def can_generate(cls):
        return False
"""
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(directory: Path, attention_dropout: float) -> ModelConfig:
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    kind = {"model_type": "own_code", "auto_map": classes, "attention_dropout": attention_dropout}
    (directory / "modeling_own.py").write_text(CODE)
    (directory / "configuration_own.py").write_text(CONFIG_CODE)
    (directory / "config.json").write_text(json.dumps(kind | SIZES | HEADS))
    return ModelConfig(name=str(directory), trust_remote_code=True, debug=DebugModelConfig(random_init=True))


@pytest.fixture(autouse=True, scope="module")
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformers copies the code of models there, and imports it as one package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def test_its_export_has_a_generation_config_though_transformers_gives_it_none(
    tmp_path: Path, tiny_model_dir: Path, mesh: Mesh
) -> None:
    model = setup_model(config_of(tmp_path, attention_dropout=0.0), mesh)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    export_model(model, tokenizer, tmp_path / "export", WeightCheckpointConfig(), torch.float32)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == model.config.eos_token_id


def test_its_code_may_compute_gradients_in_training_mode_alone(tmp_path: Path, mesh: Mesh) -> None:
    assert setup_model(config_of(tmp_path, attention_dropout=0.0), mesh).training


@pytest.mark.parametrize("file", ["configuration_own.py", "modeling_own.py", "tokenization_own.py"])
def test_code_that_needs_another_package_is_refused_in_one_line(
    file: str, tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    model = config_of(tmp_path, attention_dropout=0.0)
    shutil.copy(tiny_model_dir / "tokenizer.json", tmp_path)
    own = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "tokenization_own.py").touch()
    (tmp_path / file).write_text("import no_such_package\n")

    def load() -> None:
        setup_model(model, mesh)
        setup_tokenizer(TokenizerConfig(), model)

    with pytest.raises(ModelError, match=r"model\.name = .*not found in your environment: no_such_package\."):
        load()


def test_dropout_that_cannot_be_left_out_is_refused_in_rl_and_trained_in_sft(tmp_path: Path, mesh: Mesh) -> None:
    config = config_of(tmp_path, attention_dropout=0.3)
    with pytest.raises(ModelError, match="OwnForCausalLM"):
        setup_model(config, mesh)
    assert setup_model(config, mesh, has_dropout=True).training


LOADS_AN_EXPORT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)
"""


def loaded_elsewhere(export: Path, modules: Path) -> str:
    """The class of an exported model in a process that has never seen the base model."""
    environment = os.environ | {"HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADS_AN_EXPORT, export]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_its_export_brings_the_code_along(tmp_path: Path, tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(tmp_path, attention_dropout=0.0), mesh)
    export = tmp_path / "export"
    export_model(model, AutoTokenizer.from_pretrained(tiny_model_dir), export, WeightCheckpointConfig(), torch.float32)
    assert loaded_elsewhere(export, tmp_path / "elsewhere") == "OwnForCausalLM"


def test_the_export_of_a_class_of_transformers_names_no_code(tmp_path: Path, tiny_model_dir: Path, mesh: Mesh) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_dir, base)
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    for name, classes in (("config", code), ("tokenizer_config", {"AutoTokenizer": ["tokenization_x.X", None]})):
        file = base / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": classes}))
    model = setup_model(ModelConfig(name=str(base)), mesh)
    export = tmp_path / "export"
    export_model(model, AutoTokenizer.from_pretrained(base), export, WeightCheckpointConfig(), torch.float32)
    assert loaded_elsewhere(export, tmp_path / "elsewhere") == "Qwen3ForCausalLM"


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
