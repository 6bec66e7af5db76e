"""A chat as a process: two models answer from their own weights and remember their own words."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.checks.chat_models import ChatModel, ChatPlan

from ..trainer.vision_checkpoints import picture, save_checkpoint

MAX_TOKENS = 12


def answers(
    folder: Path, prompts: Sequence[str], adapter: Path | None = None, weights: Path | None = None
) -> list[str]:
    """What Transformers answers greedily, turn by turn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(load_file(weights / "model.safetensors"), strict=False)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    tokenizer, messages, found = AutoTokenizer.from_pretrained(folder), [], []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        drawn = model.generate(input_ids=ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
        found.append(tokenizer.decode(drawn, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def shown(titles_and_answers: Sequence[tuple[str, str]]) -> str:
    return "".join(f"[{title}]\n{answer}\n\n" for title, answer in titles_and_answers)


def command(models: Sequence[ChatModel], prompts: Sequence[str] = (), **settings: object) -> list[str]:
    plan = ChatPlan(
        tuple(models), {"temperature": 0, "max_tokens": MAX_TOKENS}, tuple(prompts), device="cpu", **settings
    )
    return [sys.executable, "-m", "prime_rl.inference.chat", plan.to_json()]


def chat(*args: object, typed: str = "", **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args, **settings), input=typed, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def base(served_model_dir: Path) -> ChatModel:
    return ChatModel("base", str(served_model_dir))


@pytest.fixture(scope="module")
def adapter(served_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "down_proj"]))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=3.0)
        peft.save_pretrained(directory)
    return directory


def test_a_chat_shows_its_images_with_the_first_message(tiny_model_dir: Path, tmp_path: Path) -> None:
    start, file = tmp_path / "start", tmp_path / "7.png"
    save_checkpoint("smolvlm", start, tiny_model_dir)
    picture(40, 30, 0).save(file)
    done = chat([ChatModel("tuned", str(start))], ["a cat?", "/reset", "a cat?"], images=[str(file)])
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"[image 40x30 sha {digest[:4]}…] {file}" in done.stderr
    first, again = done.stdout.split("[tuned]\n")[1:]
    assert first == again


def test_base_and_broadcast_weights_answer_as_transformers_does_over_two_turns(
    base: ChatModel, served_model_dir: Path, next_weights: Path
) -> None:
    tuned = ChatModel("tuned", base.name, weights=str(next_weights))
    done = chat([base, tuned], ["hello", "and you?"])
    assert done.returncode == 0, done.stderr
    of_base = answers(served_model_dir, ["hello", "and you?"])
    of_tuned = answers(served_model_dir, ["hello", "and you?"], weights=next_weights)
    assert of_base != of_tuned
    turns = [pair for both in zip(of_base, of_tuned, strict=True) for pair in zip(("base", "tuned"), both, strict=True)]
    assert done.stdout == shown(turns)


def test_an_adapter_answers_next_to_its_base(base: ChatModel, served_model_dir: Path, adapter: Path) -> None:
    done = chat([base, ChatModel("tuned", base.name, adapter=str(adapter))], ["hello"])
    assert done.returncode == 0, done.stderr
    (of_base,), (of_tuned,) = answers(served_model_dir, ["hello"]), answers(served_model_dir, ["hello"], adapter)
    assert of_base != of_tuned
    assert done.stdout == shown([("base", of_base), ("tuned", of_tuned)])


def test_lines_of_a_pipe_are_turns_and_reset_forgets_them(base: ChatModel, served_model_dir: Path) -> None:
    done = chat([base], typed="hello\nand you?\n\n/reset\nhello\n/help\n/quit\nnever\n")
    assert done.returncode == 0
    first, second = answers(served_model_dir, ["hello", "and you?"])
    assert done.stdout == shown([("base", first), ("base", second), ("base", first)])
    assert done.stderr.startswith("/help: unknown command. Type a message.")


def test_a_terminal_has_a_prompt_and_ends_with_ctrl_d(base: ChatModel, served_model_dir: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command([base]), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.write(ours, b"hello\n\x04")
        output, errors = process.communicate()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert "Ctrl-D ends the chat" in errors
    assert shown([("base", answers(served_model_dir, ["hello"])[0])]) in output


def test_a_message_longer_than_the_context_is_one_line_and_the_chat_goes_on(base: ChatModel) -> None:
    done = chat([base], typed=f"{'long ' * 400}\nhello\n")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: This model's maximum context length is 1024 tokens")
    assert done.stdout.count("[base]") == 2


def test_weights_that_do_not_fit_are_one_line(base: ChatModel, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    done = chat([ChatModel("tuned", base.name, weights=str(tmp_path))], ["hello"])
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


def test_a_base_that_cannot_be_loaded_leaves_the_tuned_model_alone(base: ChatModel, served_model_dir: Path) -> None:
    gone = ChatModel("base", "/gone/model", is_optional=True)
    done = chat([gone, base], ["hello"])
    assert done.returncode == 0
    assert done.stderr.startswith("warning: chatting without the base model: ")
    assert done.stdout == shown([("base", answers(served_model_dir, ["hello"])[0])])
