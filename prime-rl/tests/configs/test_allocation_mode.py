"""`allocation_mode` of AReaL: the whole grammar, its faults, and the keys that it sets."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.areal import AllocationError, RecoverConfig, parse
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch import LocalHost
from prime_rl.launch.restarting import FAILED, NEXT_START, launcher_fault, until_done
from prime_rl.utils.pydantic_config import ConfigError, load_config, to_toml
from prime_rl.utils.pydantic_config.base import recorded_derivations

VALID = [
    ("d8", 8, ["fsdp 8"]),
    ("d2p2t4e2c4", 64, ["megatron 64"]),
    ("vllm:d2t4", 8, ["vllm 8"]),
    ("vllm:d2t4+fsdp:d4t2", 16, ["vllm 8", "fsdp 8"]),
    ("sglang:d4p1t1+d4p1t1", 8, ["sglang 4", "fsdp 4"]),
    ("vllm[r]:d2+fsdp[a]:d4|fsdp[c]:d4", 6, ["vllm r 2", "fsdp a 4", "fsdp c 4"]),
    ("vllm[r]:d4|fsdp[a]:d4", 4, ["vllm r 4", "fsdp a 4"]),
    ("[a]:d4|megatron[c]:d4|[ref]:t2d2|[rew]:c4", 4, ["fsdp a 4", "megatron c 4", "fsdp ref 4", "fsdp rew 4"]),
    (
        "vllm[r1]:d2t2 + fsdp[a1]:d4 + vllm[r2]:d4 + fsdp[a2]:d4",
        16,
        ["vllm r1 4", "fsdp a1 4", "vllm r2 4", "fsdp a2 4"],
    ),
    ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", 16, ["megatron 16"]),
    ("megatron:(attn:d1p4t2c2|ffn:e4)", 16, ["megatron 16"]),
    ("attn:d4p2t2c2|ffn:d2p2t4e2", 32, ["megatron 32"]),
    (" vllm :\td2\n+ fsdp: d 4 ", 6, ["vllm 2", "fsdp 4"]),
    ("archon:d2e2", 2, ["archon 2"]),
    ("d4e2", 4, ["fsdp 4"]),
]

INVALID = [
    ("fsdp:d4p2", "fsdp takes d, t, c and e"),
    ("fsdp:d3e2", "3 GPUs are not a multiple of p * e = 2"),
    ("vllm:d2+fsdp:d4+fsdp:d2", "character 1: vllm:d2 has no name, and there are 3 parts: write vllm[NAME]:d2"),
    ("d4+d4", "character 4: two trainers without backend or name: write [NAME]:d4"),
    ("sglang[x]:d2+fsdp[x]:d4", "character 14: the name 'x' is given twice"),
    ("vllm:d4|fsdp:d4", "shares GPUs and has no name"),
    ("d4|d4", "character 1: d4 shares GPUs and has no name: write [NAME]:d4"),
    ("vllm[r]:d8|fsdp[a]:d4", "character 12: 4 GPUs, but vllm[r]:d8, which shares them, has 8"),
    ("(attn:d2p2t1c4|ffn:d2p4t1e2)", "p4 of ffn and p2 of attn differ"),
    ("(attn:d3|ffn:e2)", "the 3 GPUs of attn are not a multiple of e * t * p = 2"),
    ("(attn:d4p2t1c1|ffn:d2p2t2e2)", "attn takes 8 GPUs and ffn 16"),
    ("d0", "expected a whole number from 1"),
    ("D4", "letters are lower case: write 'd'"),
    ("d4t", "character 3: 't': expected a number after it"),
    ("", "is empty"),
    ("vllm:c2", "sizes of inference are d, t, p"),
    ("vllm+fsdp:d4", "character 5: expected `:` and sizes after 'vllm'"),
    ("deepspeed:d4", "unknown backend 'deepspeed': known are"),
    ("megatron:d1e2", "1 GPUs are not a multiple of p * e = 2"),
    ("vllm:d4|fsdp[a]:d4", "character 1: vllm:d4 shares GPUs and has no name"),
    ("sglang:d4+eval", "AReaL has removed `+eval`"),
    ("sglang:d4+cpu", "AReaL has removed `+cpu`"),
    ("sglang.d4p1t1+d4p1t1", "AReaL has replaced dots by colons"),
    ("d4d2", "'d' is given twice"),
    ("d04", "expected a whole number from 1"),
    ("d" + "9" * 300, "expected a whole number from 1"),
    ("d4" * 1000, "has 2000 characters"),
    ("vllm[1]:d2", "does not begin with a digit"),
    ("megatron[a]:(attn:d1|ffn:e1)", "cannot have a name"),
    ("(attn:d1|ffn:e1", "expected `)` at the end"),
    ("d4)", "expected `+`, `|` or the end, found ')'"),
    ("\x1b[31md4", r"'\x1b"),
]


@pytest.mark.parametrize(("text", "gpus", "parts"), VALID)
def test_every_form_is_read(text: str, gpus: int, parts: list[str]) -> None:
    mode = parse(text)
    shown = [" ".join(filter(None, [each.backend, each.name, str(each.sizes.gpus)])) for each in mode.allocations]
    assert (mode.gpus, shown) == (gpus, parts)


@pytest.mark.parametrize(("text", "problem"), INVALID)
def test_a_fault_says_where_and_what_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text)
    message = str(caught.value)
    assert problem in message
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("text", "expert_data", "expert_tensor"),
    [("d2p2t4e2c4", 16, 1), ("attn:d4p2t2c2|ffn:d2p2t4e2", 2, 4), ("megatron:(attn:d1p4t2c2|ffn:e4)", 1, 1)],
)
def test_experts_are_laid_out_over_the_same_gpus(text: str, expert_data: int, expert_tensor: int) -> None:
    (part,) = parse(text).allocations
    assert (part.sizes.expert_data, part.sizes.expert_tensor) == (expert_data, expert_tensor)


def test_allocations_have_names() -> None:
    mode = parse("vllm[r]:d2+fsdp[a]:d4|fsdp[c]:d4")
    assert mode["c"].sizes.data == 4
    with pytest.raises(KeyError):
        mode["x"]


@given(st.text("dtpcesvfglanm:+|[]()0123456789 AÉ\x00", max_size=40))
def test_any_text_is_an_allocation_or_one_line(text: str) -> None:
    try:
        message = f"{parse(text).gpus} GPUs"
    except AllocationError as error:
        message = str(error)
    assert message.isprintable()


def test_it_sets_the_keys_of_an_rl_run() -> None:
    with recorded_derivations() as derived:
        config = load_config(RLConfig, overrides={"allocation_mode": "vllm:d2t2+fsdp:d1c2t2"})
    assert config.inference is not None
    assert (config.trainer.model.cp, config.trainer.model.tp) == (2, 2)
    assert (config.deployment.num_infer_gpus, config.deployment.num_train_gpus) == (4, 4)
    assert (config.inference.parallel.dp, config.inference.parallel.tp) == (2, 2)
    assert ("deployment.num_train_gpus", "allocation_mode") in [(each.key, each.because) for each in derived]


def test_a_shared_pool_gives_both_parts_the_same_gpus() -> None:
    config = load_config(RLConfig, overrides={"allocation_mode": "vllm[r]:d8|fsdp[a]:d8"})
    assert config.trainer_gpu_ids == config.inference_gpu_ids == list(range(8))


def test_a_trainer_alone_uses_running_servers() -> None:
    config = load_config(RLConfig, overrides={"allocation_mode": "d4"})
    assert config.inference is None
    assert config.deployment.num_train_gpus == 4


def test_it_sets_the_keys_of_an_sft_run() -> None:
    config = load_config(SFTConfig, overrides={"allocation_mode": "d2c2t2e4"})
    assert (config.deployment.num_gpus, config.model.cp, config.model.tp, config.model.ep) == (8, 2, 2, 4)


@pytest.mark.parametrize("cls", [SFTConfig, RLConfig])
def test_a_written_config_loads_again(cls, tmp_path) -> None:
    text = "d2" if cls is SFTConfig else "vllm[r]:d5|fsdp[a]:d5"
    config = load_config(cls, overrides={"allocation_mode": text, "recover": {"mode": "auto"}, "ckpt": {}})
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load_config(cls, [file]) == config


@pytest.mark.parametrize(
    ("cls", "keys", "problem"),
    [
        (RLConfig, {"allocation_mode": "vllm:d2+p2"}, "the trainer has no pipeline parallelism (p) yet"),
        (RLConfig, {"allocation_mode": "vllm:d2+attn:d2t2|ffn:t2e2"}, "has no tensor parallelism (t) of experts"),
        (RLConfig, {"allocation_mode": "vllm:d2+megatron:d2"}, "write fsdp instead of megatron"),
        (RLConfig, {"allocation_mode": "sglang:d2+d2"}, "sglang:d2: sglang is not supported"),
        (RLConfig, {"allocation_mode": "vllm:d2p2+d2"}, "inference has no pipeline parallelism (p)"),
        (RLConfig, {"allocation_mode": "vllm:d2"}, "alone trains nothing"),
        (RLConfig, {"allocation_mode": "vllm[r]:d2+[a]:d2|[c]:d2"}, "[c]:d2: a run has one trainer"),
        (RLConfig, {"allocation_mode": "vllm:d4+d12"}, "12 GPUs are not a whole number of nodes with 8 GPUs"),
        (
            RLConfig,
            {"allocation_mode": "vllm:d4+d4", "deployment": {"num_train_gpus": 2}},
            "allocation_mode makes deployment.num_train_gpus 4, but the config sets 2",
        ),
        (
            RLConfig,
            {"allocation_mode": "vllm:t2+d4", "inference": {"parallel": {"tp": 1}}},
            "allocation_mode makes inference.parallel.tp 2, but the config sets 1",
        ),
        (RLConfig, {"allocation_mode": "vllm:d1+d1", "inference": "None"}, "the config sets inference to None"),
        (SFTConfig, {"allocation_mode": "vllm:d4+d4"}, "SFT starts no inference server"),
        (SFTConfig, {"allocation_mode": "d4x"}, "allocation_mode: 'd4x', character 3: 'x'"),
        (SFTConfig, {"recover": {"mode": "auto"}}, "recover.mode = 'auto' needs [ckpt]"),
        (SFTConfig, {"recover": {"mode": "ON"}}, "recover.mode: should be"),
        (SFTConfig, {"recover": {"retries": -1}}, "recover.retries: should be at least 0"),
        (SFTConfig, {"launcher": "kubernetes"}, "launcher: should be 'local', 'ray' or 'slurm'"),
    ],
)
def test_what_a_run_lacks_or_contradicts_is_named(cls, keys, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, overrides=keys)
    (fault,) = caught.value.faults
    assert problem in fault


@pytest.mark.parametrize(
    ("mode", "step"), [("disabled", None), ("off", None), ("fault", None), ("on", -2), ("auto", -2), ("resume", -1)]
)
def test_modes_of_recovery_say_how_to_resume(mode: str, step: int | None) -> None:
    sft = load_config(SFTConfig, overrides={"recover": {"mode": mode}, "ckpt": {"interval": 2}})
    rl = load_config(RLConfig, overrides={"recover": {"mode": mode}, "ckpt": {"interval": 2}})
    assert sft.ckpt is not None
    assert rl.trainer.ckpt is not None
    assert (sft.ckpt.resume_step, rl.trainer.ckpt.resume_step) == (step, step)


def test_a_step_that_is_asked_for_wins() -> None:
    config = load_config(SFTConfig, overrides={"recover": {"mode": "auto"}, "ckpt": {"resume_step": 7}})
    assert config.ckpt is not None
    assert config.ckpt.resume_step == 7


@pytest.mark.parametrize(
    ("mode", "codes", "starts", "last"),
    [
        ("disabled", [1], 1, 1),
        ("resume", [1], 1, 1),
        ("fault", [1, 0], 2, 0),
        ("auto", [1, 1, 1], 3, 1),
        ("auto", [2], 1, 2),
        ("on", [1, 143], 2, 143),
        ("on", [0], 1, 0),
    ],
)
def test_a_run_that_fails_is_started_again_from_its_newest_checkpoint(mode, codes, starts: int, last: int) -> None:
    asked: list[tuple[str, ...]] = []

    def start(more) -> tuple[int, RecoverConfig]:
        asked.append(tuple(more))
        return codes[len(asked) - 1], RecoverConfig(mode=mode, retries=2)

    assert until_done(start, lambda line: None) == last
    assert asked == [(), *[NEXT_START] * (starts - 1)]


def test_ctrl_c_while_a_failed_run_stops_keeps_it_from_starting_again() -> None:
    said: list[str] = []

    def start(more) -> tuple[int, RecoverConfig]:
        with LocalHost():
            os.kill(os.getpid(), signal.SIGUSR1 if not said else signal.SIGINT)
        return FAILED, RecoverConfig(mode="auto")

    assert until_done(start, said.append) == FAILED
    assert [line.split(": ")[1] for line in said] == ["starting again, 1 of 3", "not starting again after SIGINT"]


def test_a_config_for_another_launcher_is_refused_with_the_command_to_use() -> None:
    config = load_config(SFTConfig, overrides={"launcher": "ray"})
    assert launcher_fault(config, "ray", ["a b.toml"]) is None
    assert launcher_fault(config, "local", ["a b.toml"]) == (
        "launcher = 'ray': start this run with `medarc_submit sft 'a b.toml' --to ray`, or leave launcher out"
    )
