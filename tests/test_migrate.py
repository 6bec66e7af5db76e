"""What becomes of each key of older and newer versions. Section and row are those of the upstream facts."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from medarc_rl.migrate.draft import key_text, value_text
from medarc_rl.migrate.rules import Migration, migrate
from prime_rl.configs.surface.renamed import NEWER, OLDER, find_renamed, split_component
from prime_rl.utils.pydantic_config.layers import set_at, value_at
from prime_rl.utils.tables import leaves

NOT_CARRIED = object()
"""The key is listed, and not in the new file."""
DROPPED = object()
"""The key is not in the new file, which means the same without it."""

# Command, key and value of the old file; key and value of the new one.
Row = tuple[str, str, Any, str, Any]

OLDER_KEYS: list[Row] = [
    ("rl", "async_level", 2, "max_async_level", 2),
    ("rl", "async_level", 0, "", NOT_CARRIED),
    ("trainer", "async_level", 0, "max_async_level", 0),
    ("orchestrator", "async_level", 3, "max_async_level", 3),
    ("rl", "ckpt.keep", 2, "ckpt.keep_last", 2),
    ("rl", "trainer.ckpt.keep", 2, "trainer.ckpt.keep_last", 2),
    ("sft", "ckpt.keep", 2, "ckpt.keep_last", 2),
    ("sft", "ckpt.keep", 0, "", NOT_CARRIED),
    ("rl", "clean", True, "", NOT_CARRIED),
    ("sft", "clean", False, "", DROPPED),
    ("rl", "dump_config", True, "dry_run", True),
    ("rl", "dump_config", "some/directory", "", NOT_CARRIED),
    ("sft", "dump_config", True, "dry_run", True),
    ("trainer", "dump_config", True, "", NOT_CARRIED),
    ("rl", "slurm.dry_run", True, "dry_run", True),
    ("sft", "slurm.dry_run", True, "dry_run", True),
    ("rl", "inference_gpu_ids", [0, 1], "inference_gpu_ids", [0, 1]),
    ("rl", "trainer_gpu_ids", [2], "trainer_gpu_ids", [2]),
    ("rl", "teacher_gpu_ids", [3], "", NOT_CARRIED),
    ("orchestrator", "environment", {"id": "x"}, "env", [{"id": "x"}]),
    (
        "rl",
        "orchestrator.environment",
        {"id": "x", "args": {"n": 1}},
        "orchestrator.env",
        [{"id": "x", "args": {"n": 1}}],
    ),
    ("orchestrator", "environment_ids", ["x", "y"], "env", [{"id": "x"}, {"id": "y"}]),
    ("orchestrator", "environment_args", {"x": {"n": 1}}, "", NOT_CARRIED),
    ("orchestrator", "eval.environment", {"id": "x"}, "eval.env", [{"id": "x"}]),
    ("orchestrator", "eval.environment_ids", ["x"], "eval.env", [{"id": "x"}]),
    ("orchestrator", "eval.environment_args", {"x": {"n": 1}}, "", NOT_CARRIED),
    ("orchestrator", "env_mix", [1.0], "buffer.env_ratios", [1.0]),
    ("orchestrator", "env_mix", {"strategy": "interleave"}, "", NOT_CARRIED),
    ("sft", "model.experimental.lora", {"rank": 8}, "model.lora", {"rank": 8}),
    ("trainer", "model.experimental.lora.alpha", 8.0, "model.lora.alpha", 8.0),
    ("trainer", "loss.mask_ratio_low", 0.2, "loss.token_mask_low", 0.2),
    ("trainer", "loss.mask_ratio_high", 9.0, "loss.token_mask_high", 9.0),
    ("trainer", "loss.sequence_mask_ratio_low", 0.2, "loss.sequence_mask_low", 0.2),
    ("trainer", "loss.sequence_mask_ratio_high", 90.0, "loss.sequence_mask_high", 90.0),
    ("trainer", "loss.ref_tau", 0.0, "loss.teacher_tau", 0.0),
    ("trainer", "loss.ref_tau", 0.5, "loss.teacher_tau", 0.5),
    ("orchestrator", "reference_model", {"model": {"name": "x"}}, "teacher_model", {"model": {"name": "x"}}),
    ("orchestrator", "trajectory_strategy", "branching", "", NOT_CARRIED),
    ("orchestrator", "workers_per_env", 4, "", NOT_CARRIED),
    ("orchestrator", "max_env_worker_restarts", 4, "", NOT_CARRIED),
    ("orchestrator", "mask_env_responses", True, "", DROPPED),
    ("orchestrator", "mask_env_responses", False, "", NOT_CARRIED),
    ("orchestrator", "mask_truncated_completions", False, "", DROPPED),
    ("orchestrator", "mask_truncated_completions", True, "", NOT_CARRIED),
    ("orchestrator", "zero_truncated_completions", False, "", DROPPED),
    ("orchestrator", "zero_truncated_completions", True, "", NOT_CARRIED),
    ("orchestrator", "reload_weights_on_start", True, "", NOT_CARRIED),
    ("orchestrator", "env", [{"id": "x", "log": {"level": "info"}}], "env", [{"id": "x"}]),
    *(
        (kind, key, [{"id": "x", "max_reward_errors": 0.5}], key, [{"id": "x", "max_failed_groups": 0.5}])
        for kind, key in (("orchestrator", "env"), ("orchestrator", "eval.env"), ("sft", "eval.env"), ("eval", "env"))
    ),
    ("orchestrator", "eval.save", {"disk": {}}, "", NOT_CARRIED),
    ("orchestrator", "eval.retry", {"attempts": 3}, "", NOT_CARRIED),
    ("orchestrator", "ckpt.buffer_path", "x", "", NOT_CARRIED),
    ("orchestrator", "buffer.type", "simple", "", DROPPED),
    ("orchestrator", "buffer.type", "difficulty-pool", "", NOT_CARRIED),
    ("orchestrator", "buffer.type", "online-difficulty", "", NOT_CARRIED),
    ("trainer", "model.load_using_meta", True, "", NOT_CARRIED),
    ("trainer", "model.impl", "liger_kernel", "model.impl", "liger_kernel"),
    ("orchestrator", "client.server_type", "vllm", "", DROPPED),
    ("eval", "client.server_type", "openai", "", NOT_CARRIED),
    ("orchestrator", "weights", {"interval": 5}, "", NOT_CARRIED),
    ("trainer", "weights", {"interval": 5}, "", NOT_CARRIED),
    ("sft", "weights", {"interval": 5}, "", NOT_CARRIED),
    ("trainer", "weight_broadcast.adapter_only", True, "", NOT_CARRIED),
    ("eval", "use_tqdm", True, "", NOT_CARRIED),
    ("eval", "save", {"disk": {}}, "", NOT_CARRIED),
    ("eval", "resume_path", "x", "", NOT_CARRIED),
    ("eval", "watcher", True, "", NOT_CARRIED),
    ("eval", "num_examples", 30, "num_examples", [30]),
    ("eval", "rollouts_per_example", 4, "rollouts_per_example", [4]),
]

NEWER_KEYS: list[Row] = [
    ("rl", "run", {"dir": "runs/a"}, "output_dir", "runs/a"),
    ("rl", "run", {"name": "a"}, "output_dir", "outputs/a"),
    ("sft", "run", {"name": "a"}, "output_dir", "outputs/a"),
    ("rl", "run", {"tags": ["a"]}, "", NOT_CARRIED),
    ("rl", "resume.step", 20, "ckpt.resume_step", 20),
    ("sft", "resume", {}, "ckpt.resume_step", -1),
    ("sft", "resume.step", "None", "ckpt.resume_step", -1),
    ("sft", "resume", "None", "", DROPPED),
    ("trainer", "resume.dir", "x", "", NOT_CARRIED),
    ("rl", "ckpt.skip_optimizer", False, "ckpt", {}),
    ("sft", "ckpt.skip_optimizer", True, "ckpt", {}),
    ("sft", "ckpt.output_dir", "x", "ckpt", {}),
    ("rl", "monitors.wandb", {"project": "p"}, "wandb", {"project": "p"}),
    ("sft", "monitors.wandb", {}, "wandb", {}),
    ("rl", "orchestrator.monitors.wandb.project", "p", "orchestrator.wandb.project", "p"),
    ("rl", "monitors.file", {}, "", DROPPED),
    ("rl", "monitors.file", {"path": "x"}, "", NOT_CARRIED),
    ("rl", "monitors.prime", {}, "", NOT_CARRIED),
    ("rl", "monitors.other", 1, "", NOT_CARRIED),
    ("rl", "env_vars", {"A": "b"}, "", NOT_CARRIED),
    ("rl", "tokenizer.name", "x", "", NOT_CARRIED),
    ("rl", "rollout_transport", {"type": "zmq"}, "trainer.rollout_transport", {"type": "zmq"}),
    ("rl", "rollout_transport", {"type": "zmq"}, "orchestrator.rollout_transport", {"type": "zmq"}),
    ("rl", "weight_broadcast.type", "nixl", "weight_broadcast", {}),
    ("rl", "deployment.num_infer_replicas", 2, "", NOT_CARRIED),
    *(
        ("orchestrator", f"sampling.{name}", value, "", NOT_CARRIED)
        for name, value in {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {"7": 1.0},
            "bad_words": ["x"],
        }.items()
    ),
    ("rl", "deployment.orchestrator_on_inference", False, "", DROPPED),
    ("rl", "deployment.orchestrator_on_inference", True, "", NOT_CARRIED),
    ("sft", "deployment.num_train_gpus", 2, "deployment.num_gpus", 2),
    ("sft", "deployment.num_train_nodes", 2, "", NOT_CARRIED),
    ("sft", "deployment.num_infer_gpus", 2, "deployment.num_infer_gpus", 2),
    ("sft", "deployment.num_eval_gpus", 2, "deployment.num_infer_gpus", 2),
    ("sft", "inference", {}, "inference", {}),
    ("sft", "eval.interval", 2, "eval.interval", 2),
    ("sft", "deployment.num_infer_nodes", 2, "", NOT_CARRIED),
    ("sft", "deployment.num_eval_nodes", 2, "", NOT_CARRIED),
    ("sft", "eval.source", [{"env": {"taskset": {"id": "a"}}}], "", NOT_CARRIED),
    ("sft", "eval.group_size", 2, "eval.rollouts_per_example", 2),
    ("sft", "eval.env", [{"id": "a", "group_size": 2}], "eval.env", [{"id": "a", "rollouts_per_example": 2}]),
    ("sft", "eval.select.limit", 2, "eval.num_examples", 2),
    ("sft", "eval.sampling.max_completion_tokens", 2, "eval.sampling.max_tokens", 2),
    ("sft", "eval.skip_first_step", True, "eval.eval_base_model", False),
    ("sft", "eval.skip_eval_on_resume", True, "", NOT_CARRIED),
    ("sft", "eval.skip_eval_on_restart", True, "", NOT_CARRIED),
    ("sft", "eval.retrigger_on_resume", True, "", NOT_CARRIED),
    ("sft", "eval.cancel_inflight_rollouts_on_eval", True, "", NOT_CARRIED),
    ("sft", "renderer", "x", "", NOT_CARRIED),
    ("trainer", "log.ranks_filter", [0], "", NOT_CARRIED),
    ("orchestrator", "log.interval", 2, "", NOT_CARRIED),
    ("orchestrator", "group_size", 8, "rollouts_per_example", 8),
    ("orchestrator", "train.sampling.max_completion_tokens", 64, "sampling.max_tokens", 64),
    ("orchestrator", "train.sampling.temperature", 0.5, "sampling.temperature", 0.5),
    ("orchestrator", "train.sampling.top_k", 5, "sampling.top_k", 5),
    ("orchestrator", "train.source", [{"env": {"taskset": {"id": "x"}}}], "env", [{"id": "x"}]),
    ("orchestrator", "train.env", [{"id": "x", "args": {"n": 1}}], "env", [{"id": "x", "args": {"n": 1}}]),
    ("orchestrator", "train.filter_zero_advantages", False, "", DROPPED),
    ("orchestrator", "train.filter_zero_advantages", True, "", NOT_CARRIED),
    ("orchestrator", "train.other", 1, "", NOT_CARRIED),
    ("orchestrator", "eval.source", [{"env": {"taskset": {"id": "x"}}}], "eval.env", [{"id": "x"}]),
    ("orchestrator", "eval.group_size", 2, "eval.rollouts_per_example", 2),
    ("orchestrator", "eval.env", [{"id": "x", "group_size": 2}], "eval.env", [{"id": "x", "rollouts_per_example": 2}]),
    ("orchestrator", "eval.select.limit", 9, "eval.num_examples", 9),
    ("orchestrator", "eval.sampling.max_completion_tokens", 9, "eval.sampling.max_tokens", 9),
    ("orchestrator", "eval.skip_first_step", True, "eval.eval_base_model", False),
    ("orchestrator", "eval.retrigger_on_resume", False, "eval.skip_eval_on_resume", True),
    ("orchestrator", "eval.skip_first_step", "yes", "", NOT_CARRIED),
    ("orchestrator", "sampling.max_completion_tokens", 9, "sampling.max_tokens", 9),
    ("orchestrator", "model.client.base_url", "http://a/v1", "client.base_url", ["http://a/v1"]),
    ("orchestrator", "model.client.base_url", 5, "", NOT_CARRIED),
    ("orchestrator", "model.client.api_key_var", "K", "client.api_key_var", "K"),
    ("orchestrator", "algo.type", "grpo", "", NOT_CARRIED),
    ("orchestrator", "concurrency.max_inflight", 64, "", NOT_CARRIED),
    (
        "orchestrator",
        "concurrency",
        {"initial_inflight": 256, "min_inflight": 256, "max_inflight": 256},
        "max_inflight_rollouts",
        256,
    ),
    ("orchestrator", "renderer", "x", "", NOT_CARRIED),
    ("orchestrator", "tokenizer.name", "x", "", NOT_CARRIED),
    ("orchestrator", "pad_to_multiple_of", 8, "", NOT_CARRIED),
    ("orchestrator", "env_server_base_port", 8, "", NOT_CARRIED),
    ("orchestrator", "collect_inference_metrics", True, "", NOT_CARRIED),
    ("orchestrator", "collect_inference_metrics", False, "", DROPPED),
    ("trainer", "loss.dppo_mask_low", 0.2, "", NOT_CARRIED),
    ("trainer", "loss.dppo_mask_high", 0.2, "", NOT_CARRIED),
    ("trainer", "loss.type", "ipo", "", NOT_CARRIED),
    ("trainer", "model.fused_lm_head_token_chunk_size", 8192, "", NOT_CARRIED),
    ("trainer", "model.fused_lm_head_token_chunk_size", "auto", "", NOT_CARRIED),
    ("trainer", "model.fused_lm_head_token_chunk_size", "disabled", "model.fused_lm_head_chunk_size", "disabled"),
    ("trainer", "model.attn", "auto", "", DROPPED),
    ("trainer", "model.ep", "auto", "", DROPPED),
    ("sft", "model.quantization.type", "fp8", "", NOT_CARRIED),
    ("sft", "model.moe", {"x": 1}, "", NOT_CARRIED),
    ("trainer", "model.offload.optimizer", True, "", NOT_CARRIED),
    ("sft", "optim.type", "sign_sgd", "", NOT_CARRIED),
    ("trainer", "gc", {"interval": 5}, "", NOT_CARRIED),
    ("trainer", "matmul_precision", "high", "", NOT_CARRIED),
    ("trainer", "enable_token_export", False, "", DROPPED),
    ("trainer", "enable_token_export", True, "", NOT_CARRIED),
    ("sft", "data.source", [{"name": "x"}], "", NOT_CARRIED),
    ("inference", "vllm.model", "x", "model.name", "x"),
    ("rl", "inference.vllm.gpu_memory_utilization", 0.5, "inference.gpu_memory_utilization", 0.5),
    ("inference", "vllm.tensor_parallel_size", 2, "parallel.tp", 2),
    ("inference", "vllm.data_parallel_size", 2, "parallel.dp", 2),
    ("inference", "vllm.host", "x", "server.host", "x"),
    ("inference", "vllm.port", 9000, "server.port", 9000),
    ("inference", "vllm.dtype", "float32", "model.dtype", "float32"),
    ("inference", "vllm.max_model_len", 9, "model.max_model_len", 9),
    ("inference", "vllm.enforce_eager", True, "model.enforce_eager", True),
    ("inference", "vllm.tool_call_parser", "auto", "model.tool_call_parser", "auto"),
    ("inference", "vllm.reasoning_parser", "qwen3", "model.reasoning_parser", "qwen3"),
    ("inference", "vllm.reasoning_parser", "auto", "", NOT_CARRIED),
    ("inference", "vllm.rope_scaling", {"factor": 2}, "", NOT_CARRIED),
    ("inference", "vllm.trust_remote_code", True, "model.trust_remote_code", True),
    ("inference", "vllm.enable_lora", True, "enable_lora", True),
    ("inference", "vllm.max_loras", 2, "max_loras", 2),
    ("inference", "vllm.max_cpu_loras", 2, "max_cpu_loras", 2),
    ("inference", "vllm.max_lora_rank", 8, "max_lora_rank", 8),
    ("inference", "vllm.enable_prefix_caching", True, "enable_prefix_caching", True),
    ("inference", "vllm.gpu_memory_utilization", 0.5, "gpu_memory_utilization", 0.5),
    ("inference", "vllm.api_server_count", 2, "api_server_count", 2),
    ("inference", "vllm.seed", 2, "seed", 2),
    ("inference", "vllm.enable_expert_parallel", True, "enable_expert_parallel", True),
    ("inference", "vllm.all2all_backend", "pplx", "all2all_backend", "pplx"),
    ("inference", "vllm.enable_eplb", True, "enable_eplb", True),
    ("inference", "vllm.enable_sleep_mode", True, "enable_sleep_mode", True),
    ("inference", "vllm.enable_return_routed_experts", True, "enable_return_routed_experts", True),
    ("inference", "vllm.chat_template", "chatml", "model.chat_template", "chatml"),
    ("inference", "vllm.language_model_only", True, "model.language_model_only", True),
    ("inference", "router", {"x": 1}, "", NOT_CARRIED),
    ("inference", "deployment.type", "disaggregated", "", NOT_CARRIED),
    ("inference", "kv_cache_offload", {"x": 1}, "", NOT_CARRIED),
    ("inference", "backend_port", 9000, "", NOT_CARRIED),
    ("inference", "slurm", {"job_name": "x"}, "", NOT_CARRIED),
    ("inference", "dry_run", True, "", NOT_CARRIED),
    ("inference", "dry_run", False, "", DROPPED),
    ("eval", "group_size", 4, "rollouts_per_example", [4]),
    ("eval", "sampling.max_completion_tokens", 4, "sampling.max_tokens", 4),
    ("eval", "source", [{"env": {"taskset": {"id": "x"}}}], "env", [{"id": "x"}]),
]

REST_OF_THE_FILE = {
    "rl": {"max_steps": 3, "trainer": {}, "orchestrator": {}},
    "eval": {"environment_ids": ["y"]},
}
"""What a file for a command must have, or what keeps its tables from vanishing."""


def migrate_data(directory: Path, kind: str, data: dict[str, Any]) -> tuple[dict[str, Any], Migration]:
    """The new file's data, and what was said about it."""
    file = directory / "old.toml"
    file.write_text(tomli_w.dumps(data), encoding="utf-8")
    migration = migrate(file, kind)
    return tomllib.loads(migration.text), migration


def place(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


@pytest.mark.parametrize(
    ("kind", "key", "value", "new_key", "new_value"),
    [pytest.param(*row, id=f"{row[0]}:{row[1]}={row[2]}"[:60]) for row in OLDER_KEYS + NEWER_KEYS],
)
def test_a_key_is_carried_with_its_meaning_or_listed(
    tmp_path: Path, kind: str, key: str, value: Any, new_key: str, new_value: Any
) -> None:
    old = deepcopy(REST_OF_THE_FILE.get(kind, {}))
    set_at(old, place(key), value)
    new, migration = migrate_data(tmp_path, kind, tomllib.loads(tomli_w.dumps(old)))
    report = "\n".join(migration.report)
    if new_value in (NOT_CARRIED, DROPPED):
        assert key not in ("", new_key)
        assert value_at(new, place(key), NOT_CARRIED) is NOT_CARRIED
        assert f": {'dropped' if new_value is DROPPED else 'not carried'}: {key}" in report
        assert migration.complete is (new_value is DROPPED)
    else:
        assert value_at(new, place(new_key)) == new_value, report
    assert not migration.text.startswith("\n")


def test_the_table_above_covers_every_key_that_another_version_has() -> None:
    seen = set()
    for kind, key, value, _, _ in OLDER_KEYS + NEWER_KEYS:
        for full in [key, *(f"{key}.{name}" for name in keys_of(value))]:
            found = find_renamed(*split_component(kind, full))
            seen.add(found[0] if found else None)
    assert [entry.old for entry in (*OLDER, *NEWER) if entry not in seen] == []


def keys_of(value: Any) -> list[str]:
    """Names in the tables of a value, dotted."""
    if isinstance(value, list):
        return [key for item in value for key in keys_of(item)]
    items = value.items() if isinstance(value, dict) else ()
    return [key for name, item in items for key in (name, *(f"{name}.{below}" for below in keys_of(item)))]


class AnyLayout:
    """Writes data as TOML in a layout that chance decides: headers, dotted keys, inline tables, and comments."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.comments: dict[str, str] = {}

    def text(self, data: dict[str, Any]) -> str:
        return "".join(self._table(data, (), is_open=True))

    def _table(self, table: dict[str, Any], path: tuple[str, ...], is_open: bool) -> Iterator[str]:
        """Settings of a table, then, if its header is open, the tables below it."""
        later: list[tuple[str, Any]] = []
        for name, value in self._shuffled(table):
            is_list = isinstance(value, list) and value and isinstance(value[0], dict)
            if is_open and (isinstance(value, dict) or is_list) and self._random.random() < 0.6:
                later.append((name, value))
            elif isinstance(value, dict) and value and self._random.random() < 0.5:
                for below, item in leaves(value):
                    yield self._setting((*path, name, *below), key_text((name, *below)), item)
            else:
                yield self._setting((*path, name), name, value)
        for name, value in later:
            header, items = ("[[{}]]", value) if isinstance(value, list) else ("[{}]", [value])
            for item in items:
                yield f"\n{header.format('.'.join((*path, name)))}\n"
                yield from self._table(item, (*path, name), is_open=True)

    def _shuffled(self, table: dict[str, Any]) -> list[tuple[str, Any]]:
        return self._random.sample(sorted(table.items()), len(table))

    def _setting(self, path: tuple[Any, ...], key: str, value: Any) -> str:
        comment = f"# about {len(self.comments)}\n"
        self.comments[comment] = key_text(path)
        return f"{comment if self._random.random() < 0.5 else ''}{key} = {value_text(value)} {comment}"


def some_settings(rows: list[Row], kind: str, seed: int) -> dict[str, Any]:
    """A few keys of the table above, none of them in another one's way, and no environments in two forms."""
    data: dict[str, Any] = deepcopy(REST_OF_THE_FILE.get(kind, {"output_dir": "here"}))
    candidates = [row for row in rows if row[0] == kind and row[1] != "model.impl"]
    for _, key, value, _, _ in random.Random(seed).sample(candidates, min(6, len(candidates))):
        parents = [place(key)[:length] for length in range(1, len(place(key)) + 1)]
        if all(isinstance(value_at(data, parent, {}), dict) for parent in parents) and not value_at(data, place(key)):
            set_at(data, place(key), deepcopy(value))
    return data


@pytest.mark.parametrize("kind", ["rl", "sft", "eval", "trainer", "orchestrator", "inference"])
@pytest.mark.parametrize("rows", [OLDER_KEYS, NEWER_KEYS], ids=["older", "newer"])
def test_any_layout_keeps_its_comments_and_is_done_after_one_pass(tmp_path: Path, rows: list[Row], kind: str) -> None:
    for seed in range(40):
        layout = AnyLayout(seed)
        text = layout.text(some_settings(rows, kind, seed))
        file, again = tmp_path / "old.toml", tmp_path / "new.toml"
        file.write_text(text, encoding="utf-8")
        migration = migrate(file, kind)
        report = "\n".join(migration.report)
        assert "comments and the order" not in report, text
        again.write_text(migration.text, encoding="utf-8")
        assert migrate(again, kind).text == migration.text, text
        for comment, key in layout.comments.items():
            assert comment in migration.text or f"dropped: {key}" in report, (text, migration.text)
