"""What would stop a run at its start is one line and exit code 2, in dry runs and before submission, within a moment.

Each command goes through all of its cases in one process, which must not load anything heavy for any of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_slurm, medarc_train

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "transformers", "datasets", "verifiers", "vllm", "wandb", "numpy", "rich")

RUN_ALL = """
import contextlib, io, json, sys
from pathlib import Path
from {module} import main
results = dict()
for name, words in json.loads(Path({cases!r}).read_text()).items():
    sys.argv, code = [{program!r}, *words], 0
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
    results[name] = (code, said.getvalue())
print(json.dumps(dict(results=results, loaded=[name for name in {heavy!r} if name in sys.modules])))
"""

SFT = 'max_steps = 2\n[model]\nname = "some/model"\n[data]\nname = "some/data"\nseq_len = 64\n'
RL = 'max_steps = 2\n[model]\nname = "some/model"\n[trainer]\n[orchestrator]\n[inference]\n'
EVAL = 'environment_ids = ["reverse-text"]\n[model]\nname = "some/model"\n[inference]\n'
CONFIG = '{"model_type": "qwen3"}'


@dataclass(frozen=True)
class Case:
    """One fault: the options that make it, and a part of the line that says so. `{dir}` is the case's directory."""

    command: str
    options: str
    fault: str
    files: Mapping[str, str] | None = None


def model_files(config: Mapping[str, Any]) -> dict[str, str]:
    """A folder `model` that looks complete."""
    return {
        "model/config.json": json.dumps({"vocab_size": 8, **config}),
        "model/tokenizer.json": "{}",
        "model/model.safetensors": "",
    }


def packed_files(state: str) -> dict[str, str]:
    """The same with one weight in 4 bits, of which only the values and the description `state` are there."""
    name = "w.quant_state.bitsandbytes__nf4"
    tensors = {"w": [0, 1], name: [1, 1 + len(state)]}
    header = {
        each: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for each, (start, end) in tensors.items()
    }
    length = 0x101  # no byte of which is beyond ASCII
    files = model_files({"model_type": "qwen3", "quantization_config": {"load_in_4bit": True}})
    return files | {"model/model.safetensors": f"\1\1{6 * chr(0)}{json.dumps(header):<{length}}x{state}"}


def nested(family: str, named: str, language_part: str) -> dict[str, str]:
    """The same of a checkpoint that keeps its language model beside a vision tower, as on the hub."""
    parts = {"text_config": {"model_type": language_part, "vocab_size": 8}, "vision_config": {"hidden_size": 8}}
    return model_files({"model_type": family, "architectures": [named], **parts})


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_an_input_is_not_cleaned_away_with_the_directory(tmp_path: Path, words: list[str]) -> None:
    weights = shutil.copytree(ROOT / "examples/reverse_text/checkpoint", tmp_path / "out" / "weights" / "step_1")
    (tmp_path / "out" / "configs").mkdir()
    options = ["--model.name", weights, "--output-dir", tmp_path / "out", "--clean-output-dir"]
    command = ["sft", "@", ROOT / "examples/reverse_text/sft_lora_cpu.toml", *options, *words]
    result = CliRunner().invoke(medarc_train.app, list(map(str, command)))
    assert result.exit_code == 2
    assert f"model.name = {weights}: --clean-output-dir would delete it with {tmp_path / 'out'}" in result.stderr
    assert (weights / "model.safetensors").is_file()


CASES = {
    "data file that is not there": Case("sft", "--data.name {dir}/no.jsonl", "no such file or directory"),
    "no length": Case("sft", "--data.seq-len None", "data.seq_len is not set: give the tokens of a packed row"),
    "data file of another type": Case(
        "sft", "--data.name {dir}/rows.xls", "unknown file type; known are .jsonl", {"rows.xls": "a,b"}
    ),
    "data file with a spelling mistake": Case(
        "sft",
        "--data.name {dir}/rwos.csv",
        "no such file or directory; did you mean '{dir}/rows.csv'?",
        {"rows.csv": ""},
    ),
    "source that is not there": Case(
        "sft",
        '--val.data.sources [{{"name":"{dir}/rows.csv"}},{{"name":"{dir}/no.csv"}}]',
        "val.data.sources[1].name = {dir}/no.csv: no such file or directory",
        {"rows.csv": "text\na\n"},
    ),
    "trainer of allocation_mode": Case(
        "rl", "--allocation-mode vllm:d4+megatron:d8", "megatron:d8: the trainer is FSDP: write fsdp instead"
    ),
    "name and sources": Case(
        "sft",
        '--data.sources [{{"name":"some/data"}}]',
        "data: sources and name are both set: name each dataset in sources",
    ),
    "empty data file": Case("sft", "--data.name {dir}/rows.jsonl", "has no rows", {"rows.jsonl": ""}),
    "data directory without the split": Case(
        "sft", "--data.name {dir}/data --data.splits test", "(split test)", {"data/train.jsonl": "{}\n"}
    ),
    "validation data that is not there": Case(
        "sft", "--val.data.name {dir}/no.jsonl", "val.data.name = {dir}/no.jsonl: no such file"
    ),
    "teacher that is not there": Case(
        "sft", "--distillation.teacher {dir}/model", "distillation.teacher = {dir}/model: no such directory"
    ),
    "tokenizer of a teacher that is not there": Case(
        "rl",
        "--orchestrator.teacher-model.client.base-url http://127.0.0.1:9/v1 --trainer.loss.teacher-tau 1 "
        "--orchestrator.teacher-model.tokenizer {dir}/other",
        "orchestrator.teacher_model.tokenizer: {dir}/other has no tokenizer.json",
    ),
    "damaged tokenizer of a teacher": Case(
        "rl",
        "--orchestrator.teacher-model.client.base-url http://127.0.0.1:9/v1 --trainer.loss.teacher-tau 1 "
        "--orchestrator.teacher-model.tokenizer {dir}/other",
        "orchestrator.teacher_model.tokenizer: {dir}/other/tokenizer.json cannot be read as a tokenizer: ",
        {"other/tokenizer.json": '{"model": {"type": "BPE"'},
    ),
    "model folder that is not there": Case("sft", "--model.name {dir}/model", "model: no such directory"),
    "model folder of nothing": Case(
        "rl", "--model.name {dir}/model", "model: the folder has no config.json", {"model/tokenizer.json": "{}"}
    ),
    "model folder of an adapter": Case(
        "rl",
        "--model.name {dir}/model",
        "the folder holds an adapter, not a model",
        {"model/adapter_config.json": "{}", "model/tokenizer.json": "{}"},
    ),
    "model folder without weights": Case(
        "eval", "--model.name {dir}/model", "holds no weights", {"model/config.json": CONFIG}
    ),
    "model folder whose copy was cut short": Case(
        "sft",
        "--model.name {dir}/model",
        "1 of 2 files of weights are missing, such as 2.safetensors",
        {
            "model/config.json": CONFIG,
            "model/tokenizer.json": "{}",
            "model/1.safetensors": "",
            "model/model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
        },
    ),
    "tokenizer that is not there": Case(
        "rl", "--trainer.tokenizer.name {dir}/tokenizer", "tokenizer.name = {dir}/tokenizer: no such directory"
    ),
    "model folder without a tokenizer": Case(
        "sft",
        "--model.name {dir}/model --model.debug.random-init",
        "the folder holds no tokenizer",
        {"model/config.json": CONFIG},
    ),
    "chat template that is not there": Case(
        "sft", "--tokenizer.chat-template {dir}/chat.jinja", "chat.jinja': no such file, and not Jinja text"
    ),
    "chat template with a spelling mistake": Case(
        "rl",
        "--trainer.tokenizer.chat-template {dir}/chta.jinja",
        "did you mean '{dir}/chat.jinja'?",
        {"chat.jinja": "{{ messages }}"},
    ),
    "chat template of the engine that is not there": Case(
        "rl", "--inference.model.chat-template chatm1", "no such file, and not Jinja text"
    ),
    "chat template of an evaluation that is no template": Case(
        "eval",
        "--inference.model.chat-template {dir}/chat.jinja",
        "chat.jinja': the file is not Jinja text",
        {"chat.jinja": "<|im_start|>user {message}"},
    ),
    "output directory below a file": Case("sft", "--output-dir {dir}/no/out", "no is not a directory", {"no": ""}),
    "schedule that does not fit": Case("sft", "--scheduler.type linear", "do not fit into max_steps = 2"),
    "batch that cannot be shared out": Case(
        "sft", "--data.batch-size 6 --deployment.num-gpus 4", "data.batch_size = 6 is not a multiple of 4 processes"
    ),
    "step beyond the end": Case("sft", "--ckpt.resume-step 3", "ckpt.resume_step = 3 is beyond max_steps = 2"),
    "latest step beyond the end": Case(
        "rl",
        "--output-dir {dir}/run --ckpt.resume-step -1",
        "ckpt.resume_step = 5 is beyond max_steps = 2",
        {"run/checkpoints/step_5/STABLE": "", "run/run_default/checkpoints/step_5/STABLE": ""},
    ),
    "step without its part of the orchestrator": Case(
        "rl",
        "--output-dir {dir}/run --ckpt.resume-step 2",
        "checkpoint of the orchestrator, {dir}/run/run_default/checkpoints/step_2/orchestrator: resume from 1",
        {
            "run/checkpoints/step_1/STABLE": "",
            "run/checkpoints/step_2/STABLE": "",
            "run/run_default/checkpoints/step_1/STABLE": "",
        },
    ),
    "environment that is nowhere": Case(
        "rl",
        '--orchestrator.env [{{"id":"me/not-here@1.0"}}]',
        "orchestrator.env[0].id = 'me/not-here@1.0': no module named 'not_here'",
    ),
    "evaluation environment that is nowhere": Case(
        "eval", "--environment-ids not-here", "env[0].id = 'not-here': no module named 'not_here'"
    ),
    "environment that is another module": Case(
        "rl",
        '--orchestrator.env [{{"id":"json"}}]',
        "json/__init__.py is not an environment: it has no load_environment",
    ),
    "loss that is not there": Case(
        "rl", "--trainer.loss.type custom --trainer.loss.import-path losses.of.mine", "no module named 'losses.of'"
    ),
    "module without the loss": Case(
        "rl", "--trainer.loss.type custom --trainer.loss.import-path prime_rl.trainer.rl.loss.mine", "has no mine"
    ),
    "advantage that is not there": Case(
        "rl",
        "--orchestrator.advantage.type custom --orchestrator.advantage.import-path advantages.mine",
        "no module named 'advantages': put advantages.py where the run starts",
    ),
    "adapter pattern": Case(
        "sft", "--model.lora.target-modules [(q_proj]", '"(q_proj" is not a regular expression: missing )'
    ),
    "engine without the option": Case(
        "rl",
        "--inference.backend embedded --inference.enable-expert-parallel",
        "inference: enable_expert_parallel = True: only the vllm engine supports it",
    ),
    "vllm that is not installed": Case("rl", "--inference.backend vllm", "has no vLLM: install prime-rl[vllm]"),
    "context beyond the model's": Case(
        "rl",
        "--model.name {dir}/model --inference.backend embedded --inference.model.max-model-len 100",
        "max_model_len is 100, but the model's context is 64",
        {
            "model/config.json": '{"max_position_embeddings": 64, "vocab_size": 8}',
            "model/tokenizer.json": "{}",
            "model/model.safetensors": "",
        },
    ),
    "rotary frequencies that trainer and engine choose differently": Case(
        "rl",
        "--model.name {dir}/model --inference.backend embedded",
        "makes the trainer use short factors (longrope, up to 4096 tokens), and inference.model.max_model_len = None "
        "makes the engine use long factors (longrope, up to 4096 tokens)",
        {
            "model/config.json": json.dumps(
                {
                    "max_position_embeddings": 131072,
                    "original_max_position_embeddings": 4096,
                    "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
                    "vocab_size": 8,
                }
            ),
            "model/tokenizer.json": "{}",
            "model/model.safetensors": "",
        },
    ),
    "vocabulary of unknown size": Case(
        "rl",
        "--model.name {dir}/model",
        "states no vocab_size",
        {"model/config.json": CONFIG, "model/tokenizer.json": "{}", "model/model.safetensors": ""},
    ),
    "folder of a model that reads images": Case(
        "rl",
        "--model.name {dir}/model",
        "a model of type 'qwen3_vl' reads more than text, which is not supported yet: name a model for text alone",
        {
            "model/config.json": '{"model_type": "qwen3_vl", "text_config": {"vocab_size": 8}}',
            "model/tokenizer.json": "{}",
            "model/model.safetensors": "",
        },
    ),
    "folder of Ovis 2 with its vision tower": Case(
        "sft",
        "--model.name {dir}/model",
        "Ovis2ForConditionalGeneration reads images, which is not supported yet: name a model for text alone",
        nested("ovis2", "Ovis2ForConditionalGeneration", "qwen2"),
    ),
    "Llama 4 on the embedded engine": Case(
        "rl",
        "--model.name {dir}/model --inference.backend embedded",
        'does not run layers of type chunked_attention: set backend = "vllm"',
        nested("llama4", "Llama4ForConditionalGeneration", "llama4_text"),
    ),
    "no image processor": Case(
        "sft",
        "--model.name {dir}/model --model.vision.max-images 4",
        "model.vision needs the checkpoint's image processor, and it has no preprocessor_config.json",
        nested("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    ),
    "folder of an encoder": Case(
        "sft",
        "--model.name {dir}/model",
        "models of type 'bert' cannot be trained; docs/models.md lists the models that can be trained",
        model_files({"model_type": "bert"}),
    ),
    "folder of a model with an encoder": Case(
        "sft",
        "--model.name {dir}/model",
        "Transformers has no causal language model of type 't5'",
        model_files({"model_type": "t5"}),
    ),
    "folder of a model whose code is not trusted": Case(
        "sft",
        "--model.name {dir}/model",
        "comes with code: set trust_remote_code = true",
        model_files({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}),
    ),
    "compressed attention in the embedded engine": Case(
        "rl",
        "--model.name {dir}/model --inference.backend embedded",
        'the embedded engine does not run layers of type heavily_compressed_attention: set backend = "vllm"',
        model_files({"model_type": "deepseek_v4", "layer_types": ["heavily_compressed_attention", "full_attention"]}),
    ),
    "differences of attentions in the embedded engine": Case(
        "rl",
        "--model.name {dir}/model --inference.backend embedded",
        "the embedded engine does not run models of type 'diffllama' with these settings",
        model_files({"model_type": "diffllama"}),
    ),
    "folder of a quantized model": Case(
        "rl",
        "--model.name {dir}/model",
        "its weights are quantized (fp8), and training reads only bitsandbytes' 4 bits: name its version in bfloat16",
        {
            "model/config.json": '{"vocab_size": 8, "quantization_config": {"quant_method": "fp8"}}',
            "model/tokenizer.json": "{}",
            "model/model.safetensors": "",
        },
    ),
    "GPTQ": Case(
        "sft",
        "--model.name {dir}/model --model.lora.rank 8",
        "its weights are quantized (gptq), and training reads only bitsandbytes' 4 bits: name its version in bfloat16",
        model_files({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ),
    "two environments of one name": Case(
        "rl", '--orchestrator.env [{{"id":"reverse-text"}},{{"id":"reverse-text"}}]', "is called 'reverse-text'"
    ),
}
if find_spec("bitsandbytes") is not None:  # without it, its absence is a second fault
    CASES["experts, which are not quantized"] = Case(
        "sft",
        "--model.name {dir}/model --model.lora.rank 8 --model.quantization.type nf4",
        "model.quantization does not cover the experts of Qwen3MoeForCausalLM",
        model_files({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}),
    )
    for what, state, damage in (
        ("their scales", '{"shape": [8, 64], "blocksize": 64, "dtype": "bfloat16"}', "w.absmax is missing"),
        ("a description", '{"shape": [8, 64', "model.safetensors: w.quant_state.bitsandbytes__nf4 is damaged"),
    ):
        CASES[f"weights in 4 bits without {what}"] = Case(
            "sft",
            "--model.name {dir}/model --model.lora.rank 8",
            f"its weights in 4 bits are damaged: {damage}",
            packed_files(state),
        )
OTHER_WAYS = {
    "run": "medarc_train",
    "estimate": "medarc_train",
    "preflight": "medarc_train",
    "estimate of a job": "medarc_slurm",
    "check": "medarc_slurm",
}
"""What else answers whether a config can start, besides a dry run, and the program that does."""
DOWNLOADED = ("copy was cut short", "without a tokenizer", "without weights")
"""Ends of cases that an estimate does not refuse: it needs no files but `config.json`."""
PROGRAMS = ("medarc_train", "medarc_slurm", "engine")
RUNS = [
    (program, name)
    for program in PROGRAMS
    for name, case in CASES.items()
    if (program, case.command) != ("medarc_slurm", "eval")
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of every case, and a project whose environment is this one."""
    root = tmp_path_factory.mktemp("cases")
    (root / "project").mkdir()
    (root / "project" / ".venv").symlink_to(sys.prefix)
    for command, base in (("sft", SFT), ("rl", RL), ("eval", EVAL)):
        (root / f"{command}.toml").write_text(base)
    for name, case in CASES.items():
        directory_of(root, name).mkdir()
        for path, text in (case.files or {}).items():
            file = directory_of(root, name) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root


def directory_of(root: Path, name: str) -> Path:
    return root / name.replace(" ", "_")


def words_of(root: Path, name: str, program: str) -> list[str]:
    case, directory = CASES[name], directory_of(root, name)
    options = case.options.format(dir=directory).split()
    place = [] if "--output-dir" in options else ["--output-dir", str(directory / "out")]
    if not _goes_on(name, program):
        place.append("--dry-run")
    config = str(root / f"{case.command}.toml")
    if program == "engine":
        return ["@", config, *options, *place]
    project = ["--project-dir", str(root / "project")] if program == "medarc_slurm" else []
    return [case.command, config, *options, *place, *project]


def _goes_on(name: str, program: str) -> bool:
    """Whether a dry run only warns of a fault: of packages, and of environments of a job on another machine."""
    return name.endswith("not installed") or (program == "medarc_slurm" and name.endswith("is nowhere"))


def run_all(root: Path, program: str, module: str, cases_words: Mapping[str, list[str]]) -> dict[str, tuple[int, str]]:
    """What each case's exit code was, and its stderr."""
    cases = root / f"{module}.json"
    cases.write_text(json.dumps(cases_words))
    code = RUN_ALL.format(module=module, cases=str(cases), program=program, heavy=HEAVY)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PRIME_")}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["loaded"] == []
    return told["results"]


@pytest.fixture(scope="module")
def results(root: Path) -> dict[tuple[str, str], tuple[int, str]]:
    found = {}
    for program in PROGRAMS:
        mine = {name: words_of(root, name, program) for of_program, name in RUNS if of_program == program}
        if program != "engine":
            found |= {
                (program, name): each for name, each in run_all(root, program, f"medarc_rl.{program}", mine).items()
            }
            continue
        for command in ("sft", "rl", "eval"):
            words = {name: each for name, each in mine.items() if CASES[name].command == command}
            ran = run_all(root, program, f"prime_rl.entrypoints.{command}", words)
            found |= {(program, name): each for name, each in ran.items()}
    return found


@pytest.mark.parametrize(("program", "name"), RUNS, ids=lambda word: word.replace(" ", "_"))
def test_a_fault_is_one_line_and_exit_code_2(
    program: str, name: str, root: Path, results: dict[tuple[str, str], tuple[int, str]]
) -> None:
    code, said = results[program, name]
    lines = [line for line in said.splitlines() if not line.startswith("warning: ")]
    assert (code, len(lines)) == (2, 1), said
    assert lines[0].startswith("error: ")
    assert CASES[name].fault.replace("{dir}", str(directory_of(root, name))) in lines[0]
    assert not (directory_of(root, name) / "out").exists()


def test_every_check_and_the_run_refuse_what_a_dry_run_refuses(
    root: Path, results: dict[tuple[str, str], tuple[int, str]]
) -> None:
    """All cases by all ways. A case that one of them accepts would start a run here."""
    different = []
    for program in ("medarc_train", "medarc_slurm"):
        asked = {
            f"{way}: {name}": other_words(root, name, way)
            for way, of_program in OTHER_WAYS.items()
            for name, case in CASES.items()
            if of_program == program and case.command != "eval" and not is_tolerated(name, way)
        }
        for key, (code, said) in run_all(root, program, f"medarc_rl.{program}", asked).items():
            name = key.partition(": ")[2]
            dry_code, dry_said = results[program, name]
            faults, expected = (
                [line for line in text.splitlines() if line.startswith("error: ")] for text in (said, dry_said)
            )
            if (code, faults) != (dry_code, expected):
                different.append((key, code, faults, expected))
    assert different == []


def other_words(root: Path, name: str, way: str) -> list[str]:
    command, *words = (word for word in words_of(root, name, OTHER_WAYS[way]) if word != "--dry-run")
    if way == "check":
        return ["check", command, *words]
    return [command, *words, *([] if way == "run" else [f"--{way.split()[0]}"])]


def is_tolerated(name: str, way: str) -> bool:
    """Whether an estimate, which reads only `config.json` and asks for no package, goes on."""
    return way.startswith("estimate") and name.endswith((*DOWNLOADED, "not installed", "is nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "name"), [run for run in RUNS if run[0] != "engine" and _goes_on(run[1], run[0])])
def test_a_dry_run_warns_of_what_the_run_may_find_elsewhere_and_goes_on(program: str, name: str, root: Path) -> None:
    words = [*words_of(root, name, program), "--dry-run"]
    app = {"medarc_train": medarc_train.app, "medarc_slurm": medarc_slurm.app}[program]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert any(line.startswith("warning: ") and CASES[name].fault in line for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("vllm:d5+fsdp:d4", "takes 4 GPUs for the trainer and 5 for the server: this command uses one node"),
        ("d2", "names no server, and this command starts one"),
    ],
)
def test_an_allocation_that_this_command_cannot_make_is_named_in_its_own_words(
    tmp_path: Path, mode: str, fault: str
) -> None:
    (tmp_path / "rl.toml").write_text(RL)
    result = CliRunner().invoke(medarc_train.app, ["rl", str(tmp_path / "rl.toml"), "--allocation-mode", mode])
    assert result.exit_code == 2
    assert f"error: allocation_mode = {mode!r} {fault}" in result.stderr
    assert "--train-gpus" not in result.stderr
