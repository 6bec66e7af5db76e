"""What an unknown key's line suggests. A wrong suggestion is worse than none."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.surface.not_built import NOT_BUILT
from prime_rl.configs.surface.renamed import RENAMED, Renamed, find_renamed, split_component
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigError, load_config, parse_argv
from prime_rl.utils.pydantic_config.faults import is_misspelling
from prime_rl.utils.pydantic_config.schema import has_key, walk_fields

ROOT_OF = {root.component: root for root in ROOTS}

LOAD_IN_4BIT = 'model.quantization.type ("nf4", with [model.lora])'
KL = "a penalty on the KL divergence from the starting model"

OLDER: list[tuple[type, str, str | None]] = [
    (RLConfig, "async_level", "use max_async_level"),
    (RLConfig, "trainer.async_level", "use trainer.max_async_level"),
    (OrchestratorConfig, "async_level", "use max_async_level"),
    (RLConfig, "ckpt.keep", "use ckpt.keep_last"),
    (TrainerConfig, "ckpt.keep", "use ckpt.keep_last"),
    (RLConfig, "teacher_gpu_ids", "use deployment.num_teacher_gpus (a count)"),
    (RLConfig, "clean", "use clean_output_dir"),
    (SFTConfig, "clean", "use clean_output_dir"),
    (RLConfig, "dump_config", "use dry_run"),
    (TrainerConfig, "dump_config", "remove it"),
    (SFTConfig, "slurm.dry_run", "use dry_run"),
    (RLConfig, "orchestrator.environment.id", "use orchestrator.env (one [[env]] table for each environment)"),
    (OrchestratorConfig, "environment.args.split", "use env (one [[env]] table for each environment)"),
    (OrchestratorConfig, "environment_ids", "use env (one [[env]] table for each environment)"),
    (OrchestratorConfig, "eval.environment_ids", "use eval.env (one table for each environment)"),
    (OrchestratorConfig, "eval.environment_args.x", "use eval.env (`args` of each table)"),
    (OrchestratorConfig, "env_mix", "use buffer.env_ratios"),
    (OrchestratorConfig, "trajectory_strategy", "remove it"),
    (OrchestratorConfig, "workers_per_env", "remove it"),
    (OrchestratorConfig, "max_env_worker_restarts", "remove it"),
    (OrchestratorConfig, "mask_env_responses", "remove it"),
    (OrchestratorConfig, "mask_truncated_completions", "remove it"),
    (OrchestratorConfig, "zero_truncated_completions", "remove it"),
    (OrchestratorConfig, "reload_weights_on_start", "remove it"),
    (OrchestratorConfig, "eval.save.disk", "remove it"),
    (OrchestratorConfig, "eval.retry", "use eval.env.max_retries (in each [[eval.env]] table)"),
    (OrchestratorConfig, "ckpt.buffer_path", "remove it"),
    (
        OrchestratorConfig,
        "buffer.type",
        "use buffer.easy_threshold, buffer.hard_threshold and buffer.online_difficulty_filtering "
        "(`simple` is the default)",
    ),
    (TrainerConfig, "model.experimental.lora.rank", "use model.lora.rank"),
    (RLConfig, "trainer.model.experimental.lora.rank", "use trainer.model.lora.rank"),
    (TrainerConfig, "model.experimental.other", None),
    (TrainerConfig, "model.load_using_meta", "remove it"),
    (OrchestratorConfig, "client.server_type", "remove it"),
    (OrchestratorConfig, "weights.path", "remove it"),
    (
        TrainerConfig,
        "weights.interval",
        "use ckpt.weights and weight_broadcast (weights to keep, and weights for the inference servers)",
    ),
    (SFTConfig, "weights.interval", "use ckpt.weights (weights are exported with checkpoints)"),
    (TrainerConfig, "weight_broadcast.adapter_only", "remove it"),
    (TrainerConfig, "loss.mask_ratio_high", "use loss.token_mask_high"),
    (RLConfig, "trainer.loss.mask_ratio_low", "use trainer.loss.token_mask_low"),
    (TrainerConfig, "loss.sequence_mask_ratio_low", "use loss.sequence_mask_low"),
    (TrainerConfig, "loss.ref_tau", "use loss.teacher_tau"),
    (OrchestratorConfig, "reference_model.model.name", "use teacher_model.model.name"),
    (OfflineEvalConfig, "use_tqdm", "remove it"),
    (OfflineEvalConfig, "save.env_hub", "remove it: results are always written to <output_dir>/eval"),
    (OfflineEvalConfig, "resume_path", "remove it: run again with the same output_dir to complete an evaluation"),
    (OfflineEvalConfig, "watcher", "evaluate during training with [orchestrator.eval]"),
]

NEWER: list[tuple[type, str, str | None]] = [
    (RLConfig, "run.name", "use output_dir (a run is its directory; wandb.name names it for W&B)"),
    (RLConfig, "run.dir", "use output_dir"),
    (RLConfig, "resume.step", "use ckpt.resume_step"),
    (RLConfig, "resume.dir", "a run resumes from its own output_dir"),
    (RLConfig, "ckpt.output_dir", "checkpoints are written to output_dir"),
    (TrainerConfig, "ckpt.skip_optimizer", "a checkpoint is always loaded with its optimizer"),
    (RLConfig, "monitors.wandb.project", "use wandb.project"),
    (RLConfig, "monitors.wandb.tags", "monitors.wandb is wandb here, which has no tags"),
    (RLConfig, "monitors.file.path", "remove it: metrics.jsonl is always written"),
    (RLConfig, "monitors.prime.base_url", "metrics go to metrics.jsonl and W&B"),
    (SFTConfig, "monitors.wandb.name", "use wandb.name"),
    (RLConfig, "env_vars.NCCL_DEBUG", "set environment variables outside the config"),
    (TrainerConfig, "env_vars.NCCL_DEBUG", "set environment variables outside the config"),
    (RLConfig, "inference.env_vars.VLLM_X", "set environment variables outside the config"),
    (RLConfig, "tokenizer.name", "use trainer.tokenizer.name"),
    (RLConfig, "rollout_transport.type", "use trainer.rollout_transport.type and orchestrator.rollout_transport.type"),
    (
        RLConfig,
        "deployment.num_infer_replicas",
        "the number of copies follows from the GPUs and parallel.tp",
    ),
    (RLConfig, "deployment.orchestrator_on_inference", "remove it"),
    (RLConfig, "log.ranks_filter", "remove it"),
    (RLConfig, "log.interval", "remove it"),
    (OrchestratorConfig, "group_size", "use rollouts_per_example"),
    (RLConfig, "orchestrator.group_size", "use orchestrator.rollouts_per_example"),
    (RLConfig, "orchestrator.train.sampling.max_completion_tokens", "use orchestrator.sampling.max_tokens"),
    (RLConfig, "orchestrator.train.sampling.temperature", "use orchestrator.sampling.temperature"),
    (
        RLConfig,
        "orchestrator.train.sampling.extra_body.chat_template_kwargs.x",
        "use orchestrator.sampling.extra_body.chat_template_kwargs.x",
    ),
    (
        RLConfig,
        "orchestrator.train.sampling.top_a",
        "orchestrator.train.sampling is orchestrator.sampling here, which has no top_a",
    ),
    (RLConfig, "orchestrator.train.sampling.top_p", "use orchestrator.sampling.top_p"),
    (
        RLConfig,
        "orchestrator.train.source.env.taskset.id",
        "use orchestrator.env (training environments are [[orchestrator.env]] tables with `id` and `args`)",
    ),
    (
        RLConfig,
        "orchestrator.train.filter_zero_advantages",
        "use orchestrator.buffer.drop_equal_rewards (which replaces the groups that it drops)",
    ),
    (
        OrchestratorConfig,
        "eval.source.env",
        "use eval.env (eval environments are [[orchestrator.eval.env]] tables with `id` and `args`)",
    ),
    (OrchestratorConfig, "eval.group_size", "use eval.rollouts_per_example"),
    (OrchestratorConfig, "eval.select.limit", "use eval.num_examples"),
    (OrchestratorConfig, "eval.sampling.max_completion_tokens", "use eval.sampling.max_tokens"),
    (RLConfig, "orchestrator.eval.sampling.max_completion_tokens", "use orchestrator.eval.sampling.max_tokens"),
    (OrchestratorConfig, "sampling.max_completion_tokens", "use sampling.max_tokens"),
    (OrchestratorConfig, "eval.skip_first_step", "use eval.eval_base_model (with the opposite value)"),
    (OrchestratorConfig, "eval.retrigger_on_resume", "use eval.skip_eval_on_resume (with the opposite value)"),
    (RLConfig, "orchestrator.model.client.base_url", "use orchestrator.client.base_url (a list)"),
    (RLConfig, "orchestrator.model.client.api_key_var", "use orchestrator.client.api_key_var"),
    (
        RLConfig,
        "orchestrator.model.client.connect",
        "orchestrator.model.client is orchestrator.client here, which has no connect",
    ),
    (RLConfig, "orchestrator.algo.type", "use orchestrator.advantage (the advantage function: docs/algorithms.md)"),
    (OrchestratorConfig, "algo.type", "use advantage (the advantage function: docs/algorithms.md)"),
    (
        OrchestratorConfig,
        "concurrency.max_inflight",
        "use max_inflight_rollouts (a fixed number of rollouts, not an adaptive one)",
    ),
    (OrchestratorConfig, "renderer.name", "prompts are rendered with the tokenizer's chat template"),
    (OrchestratorConfig, "tokenizer.name", "use tokenizer.name in the config of trainer"),
    (OrchestratorConfig, "pad_to_multiple_of", "remove it"),
    (OrchestratorConfig, "env_server_base_port", "remove it"),
    (OrchestratorConfig, "collect_inference_metrics", "remove it"),
    (TrainerConfig, "loss.dppo_mask_low", "use loss.token_mask_low (a bound on the ratio)"),
    (TrainerConfig, "loss.dppo_mask_high", "use loss.token_mask_high (a bound on the ratio)"),
    (
        RLConfig,
        "trainer.model.fused_lm_head_token_chunk_size",
        "use trainer.model.fused_lm_head_chunk_size (counted in vocabulary entries, not tokens)",
    ),
    (SFTConfig, "model.moe.dispatch.type", "see model.moe_use_grouped_mm"),
    (
        TrainerConfig,
        "model.offload",
        "use model.fsdp_cpu_offload and model.optim_cpu_offload (`full` and `optimizer`)",
    ),
    (TrainerConfig, "gc.interval", "remove it"),
    (TrainerConfig, "matmul_precision", "remove it"),
    (TrainerConfig, "enable_token_export", "orchestrator.save_rollouts writes the rollouts"),
    (InferenceConfig, "router.type", "one server is started; list several in orchestrator.client.base_url"),
    (
        RLConfig,
        "inference.deployment.num_decode_replicas",
        "one server is started; its GPUs are deployment.num_infer_gpus of rl",
    ),
    (RLConfig, "inference.kv_cache_offload", "remove it"),
    (InferenceConfig, "backend_port", "use server.port"),
    (InferenceConfig, "slurm.partition", "the server runs in the job of its run"),
    (InferenceConfig, "dry_run", "remove it"),
    (RLConfig, "inference.use_deep_gemm", None),
    (SFTConfig, "deployment.num_train_gpus", "use deployment.num_gpus"),
    (SFTConfig, "deployment.num_train_nodes", "use deployment.num_nodes"),
    (SFTConfig, "deployment.num_infer_nodes", "the evaluation of sft runs on one node"),
    (SFTConfig, "deployment.num_eval_gpus", "use deployment.num_infer_gpus"),
    (SFTConfig, "eval.sampling.max_completion_tokens", "use eval.sampling.max_tokens"),
    (SFTConfig, "renderer.name", "samples are rendered with the tokenizer's chat template"),
    (SFTConfig, "data.source.dataset", "use data.name (one dataset; several stand in [[data.sources]])"),
    (OfflineEvalConfig, "group_size", "use rollouts_per_example"),
    (OfflineEvalConfig, "sampling.max_completion_tokens", "use sampling.max_tokens"),
    (OfflineEvalConfig, "source.env", "use env (environments are [[env]] tables with `id` and `args`)"),
    (TrainerConfig, "optim.learning_rate", "use optim.lr"),
    (SFTConfig, "optim.max_grad_norm", "use optim.max_norm"),
]

ELSEWHERE: list[tuple[type, str, str | None]] = [
    # Transformers' Trainer.
    (SFTConfig, "learning_rate", "use optim.lr"),
    (TrainerConfig, "learning_rate", "use optim.lr"),
    (RLConfig, "learning_rate", "use trainer.optim.lr"),
    (
        SFTConfig,
        "per_device_train_batch_size",
        "use data.micro_batch_size (sequences that a GPU computes at once; data.batch_size are those of a step)",
    ),
    (
        SFTConfig,
        "gradient_accumulation_steps",
        "a step is one batch, split over GPUs and accumulated as needed: see data.batch_size and data.micro_batch_size",
    ),
    (SFTConfig, "num_train_epochs", "use num_epochs"),
    (RLConfig, "num_train_epochs", "rl counts steps: set max_steps"),
    (SFTConfig, "warmup_steps", "did you mean scheduler.warmup_steps?"),
    (SFTConfig, "warmup_ratio", "did you mean scheduler.warmup_ratio?"),
    (SFTConfig, "lr_scheduler_type", "use scheduler.type (constant, linear or cosine)"),
    (SFTConfig, "weight_decay", "did you mean optim.weight_decay?"),
    (SFTConfig, "max_grad_norm", "use optim.max_norm"),
    (SFTConfig, "adam_beta2", "use optim.betas2"),
    (SFTConfig, "bf16", "use model.compute_dtype (bfloat16 is the default on a GPU)"),
    (RLConfig, "bf16", "use trainer.model.compute_dtype (bfloat16 is the default on a GPU)"),
    (SFTConfig, "fp16", "float16 is not supported; bfloat16 is the default on a GPU"),
    (SFTConfig, "report_to", "use wandb (a table: [wandb]; metrics.jsonl is always written)"),
    (RLConfig, "run_name", "use wandb.name"),
    (SFTConfig, "save_steps", "use ckpt.interval"),
    (SFTConfig, "save_total_limit", "use ckpt.keep_last"),
    (SFTConfig, "resume_from_checkpoint", "use ckpt.resume_step (a step; -1 is the latest)"),
    (SFTConfig, "eval_steps", "use val.interval"),
    (SFTConfig, "logging_steps", "remove it: every step is logged"),
    (SFTConfig, "deepspeed", "remove it: FSDP2 is always used"),
    (SFTConfig, "gradient_checkpointing", "use model.ac (a table: [model.ac])"),
    (SFTConfig, "debug", "remove it"),
    (SFTConfig, "use_cpu", 'use device ("cpu")'),
    (SFTConfig, "optim_args", None),
    (SFTConfig, "label_smoothing_factor", None),
    # TRL.
    (SFTConfig, "max_seq_length", "use data.seq_len"),
    (SFTConfig, "max_length", "use data.seq_len"),
    (SFTConfig, "packing", "use data.pack_function (rows are always packed)"),
    (SFTConfig, "assistant_only_loss", "use data.loss_mask (assistant messages alone are the default)"),
    (SFTConfig, "model_name_or_path", "use model.name"),
    (SFTConfig, "dataset_name", "use data.name"),
    (SFTConfig, "lora_target_modules", "use model.lora.target_modules"),
    (RLConfig, "num_generations", "use orchestrator.rollouts_per_example"),
    (RLConfig, "max_completion_length", "use orchestrator.sampling.max_tokens (per turn)"),
    (RLConfig, "max_prompt_length", "prompts are not cut: seq_len bounds prompt and answer together"),
    (RLConfig, "reward_funcs", "use orchestrator.env (rewards belong to the environment)"),
    # axolotl.
    (SFTConfig, "base_model", "use model.name"),
    (SFTConfig, "sequence_len", "use data.seq_len"),
    (SFTConfig, "sample_packing", "use data.pack_function (rows are always packed)"),
    (SFTConfig, "micro_batch_size", "did you mean data.micro_batch_size or val.data.micro_batch_size?"),
    (SFTConfig, "lora_r", "use model.lora.rank"),
    (RLConfig, "lora_alpha", "use trainer.model.lora.alpha"),
    (SFTConfig, "train_on_inputs", "use data.loss_mask (the roles whose messages are trained on)"),
    (SFTConfig, "wandb_project", "use wandb.project"),
    (SFTConfig, "flash_attention", "use model.attn (flash_attention_2 is the default)"),
    (SFTConfig, "load_in_4bit", f"use {LOAD_IN_4BIT}"),
    (SFTConfig, "model.load_in_4bit", f"use {LOAD_IN_4BIT}"),
    (SFTConfig, "load_in_8bit", 'use model.quantization.type ("int8", with [model.lora])'),
    (
        SFTConfig,
        "model.quantization_config",
        'set model.quantization = "nf4" or "int8", with [model.lora]; `--estimate` says how much memory is needed',
    ),
    (
        SFTConfig,
        "model.pp",
        "there is no pipeline parallelism: divide layers with model.tp, rows with model.cp, experts with model.ep",
    ),
    (RLConfig, "trainer.model.load_in_4bit", f"use trainer.{LOAD_IN_4BIT}"),
    (RLConfig, "beta", f"use trainer.loss.kl_coef ({KL})"),
    (RLConfig, "kl_coef", f"use trainer.loss.kl_coef ({KL})"),
    (RLConfig, "trainer.loss.beta", f"use trainer.loss.kl_coef ({KL})"),
    (RLConfig, "trainer.loss.kl_loss_coef", f"use trainer.loss.kl_coef ({KL})"),
    (RLConfig, "seed", "use orchestrator.seed"),
    (RLConfig, "gpus", "use --train-gpus N and --infer-gpus N; CUDA_VISIBLE_DEVICES says which"),
    (SFTConfig, "seed", "use data.seed (of the shuffle)"),
    (SFTConfig, "val_size", "use val.size (or val.fraction; for another file or split [val.data])"),
    (
        SFTConfig,
        "val_set_size",
        "use val.fraction (or val.size, a number of rows; for another file or split [val.data])",
    ),
    (SFTConfig, "load_best_model_at_end", "use ckpt.keep_best"),
    (RLConfig, "load_best_model_at_end", "use ckpt.keep_best"),
    (SFTConfig, "early_stopping_patience", "use early_stop.patience"),
    (RLConfig, "early_stopping_threshold", "use early_stop.min_delta"),
    (RLConfig, "metric_for_best_model", "use orchestrator.eval.metric"),
    (SFTConfig, "metric_for_best_model", "remove it: the validation loss decides"),
    (SFTConfig, "push", "upload <output_dir>/weights/step_<n> with `hf upload`"),
]

MISTAKES: list[tuple[type, str, str | None]] = [
    # Misspelled: the same words, with a slip in one of them.
    (TrainerConfig, "optim.lrr", "did you mean optim.lr?"),
    (TrainerConfig, "optim.weigth_decay", "did you mean optim.weight_decay?"),
    (TrainerConfig, "maxsteps", "did you mean max_steps?"),
    (TrainerConfig, "rollout_transport.prot", "did you mean rollout_transport.port?"),
    (SFTConfig, "data.nmae", "did you mean data.name?"),
    (SFTConfig, "data.loss_mask.asistant", "did you mean data.loss_mask.assistant?"),
    (InferenceConfig, "parallel.tpp", "did you mean parallel.tp?"),
    (EnvServerConfig, "env.idd", "did you mean env.id?"),
    # In the wrong section, where the name says which is the right one.
    (TrainerConfig, "lr", "did you mean optim.lr or critic.optim.lr?"),
    (TrainerConfig, "optim.max_steps", "did you mean max_steps?"),
    (RLConfig, "optim.lr", "did you mean trainer.optim or orchestrator.optim?"),
    (TrainerConfig, "trainer.optim.lr", "leave out `trainer`: this is the config of trainer itself"),
    # Nothing is near enough.
    (InferenceConfig, "parallel.ep", None),
    (RLConfig, "ckpt.async_save", "did you mean trainer.ckpt.async_save?"),
    (OrchestratorConfig, "ckpt.async_save", None),
    (OrchestratorConfig, "sampling.min_len", None),
    (TrainerConfig, "name", None),
    (TrainerConfig, "scheduler.power", None),
    (TrainerConfig, "frobnicate", None),
    (OrchestratorConfig, "eval.sampling.beams", None),
]


def line_for(config_cls: type, key: str) -> str:
    """The line about `key`, in a file that is otherwise right."""
    value: Any = 3
    for part in reversed(key.split(".")):
        value = {part: value}
    required: dict[str, Any] = {"trainer": {}, "orchestrator": {}} if config_cls is RLConfig else {}
    with pytest.raises(ConfigError) as caught:
        load_config(config_cls, [], required | value)
    (line,) = [fault for fault in caught.value.faults if "unknown key" in fault]
    return line


@pytest.mark.parametrize(("config_cls", "key", "hint"), [*OLDER, *NEWER, *ELSEWHERE, *MISTAKES])
def test_an_unknown_key_gets_the_right_hint_or_none(config_cls: type, key: str, hint: str | None) -> None:
    before, _, after = line_for(config_cls, key).partition(": unknown key")
    assert key.startswith(before.removeprefix("override: "))
    assert after == (f"; {hint}" if hint else "")


@pytest.mark.parametrize("entry", RENAMED, ids=lambda entry: entry.old)
def test_every_hint_names_keys_that_exist(entry: Renamed) -> None:
    for new in entry.new:
        component, _, key = new.partition(".")
        owners = list(ROOT_OF) if component == "*" else [component]
        having = [owner for owner in owners if has_key(ROOT_OF[owner], key.split("."))]
        assert having
        if {f"{owner}.{key}" for owner in having} & {unbuilt.key for unbuilt in NOT_BUILT if not unbuilt.values}:
            assert "not supported yet" in entry.note


def test_a_hint_is_left_out_where_its_key_does_not_exist() -> None:
    assert line_for(InferenceConfig, "async_level") == "override: async_level: unknown key"


@pytest.mark.parametrize("entry", RENAMED, ids=lambda entry: entry.old)
def test_every_entry_is_found_before_any_other(entry: Renamed) -> None:
    component, _, key = entry.old.replace("*.", "trainer.", 1).replace("*", "x").partition(".")
    found = find_renamed(component, key)
    assert found == (entry, "")


def test_no_valid_key_counts_as_renamed() -> None:
    for root in ROOTS:
        for path, _, _ in walk_fields(root):
            assert find_renamed(*split_component(root.component, ".".join(path))) is None


def test_a_table_of_another_version_is_answered_key_by_key(toml, faults) -> None:
    file = toml(
        "[trainer]\n[orchestrator.train]\n[[orchestrator.train.source]]\nratio = 1\nenv.taskset.id = 'x'\n"
        "[orchestrator.train.sampling]\nmax_completion_tokens = 9\ntemperature = 1\n"
        "[monitors.wandb]\nproject = 'p'\n[monitors.file]\n[env_vars]\nA = '1'\nB = '2'\n"
        "[inference.vllm]\nmodel = 'm'\nquantization = 'q'\nmax_num_seqs = 9\nhost = 'x'\n"
    )
    source = "use orchestrator.env (training environments are [[orchestrator.env]] tables with `id` and `args`)"
    assert sorted(faults(RLConfig, files=(file,))) == [
        f"{file}: env_vars: unknown key; set environment variables outside the config",
        f"{file}: inference.vllm: host cannot be set here: set server.host; model cannot be set here: set model.name",
        f"{file}: monitors.file: unknown key; remove it: metrics.jsonl is always written",
        f"{file}: monitors.wandb.project: unknown key; use wandb.project",
        f"{file}: orchestrator.train.sampling.max_completion_tokens: unknown key; use orchestrator.sampling.max_tokens",
        f"{file}: orchestrator.train.sampling.temperature: unknown key; use orchestrator.sampling.temperature",
        f"{file}: orchestrator.train.source.0: unknown key; {source}",
    ]


def test_an_option_of_another_version_is_answered_with_options(faults) -> None:
    assert faults(RLConfig, "--async-level", "2") == ["--async-level: unknown option; use --max-async-level"]
    assert faults(RLConfig, "--orchestrator.env.0.max_reward_errors", "0.3") == [
        "--orchestrator.env.0.max_reward_errors: unknown option; use --orchestrator.env.max-failed-groups "
        "(a share of groups instead of rollouts)"
    ]
    assert faults(RLConfig, "--orchestrator.train.sampling.max-completion-tokens", "9") == [
        "--orchestrator.train.sampling.max-completion-tokens: unknown option; use --orchestrator.sampling.max-tokens"
    ]
    assert faults(TrainerConfig, "--frobnicate", "9") == ["--frobnicate: unknown option"]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [("lrr", "lr"), ("max-steps", "max_steps"), ("batchsize", "batch_size"), ("windows", "window"), ("nmae", "name")],
)
def test_a_slip_in_a_word_is_a_misspelling(wrong: str, name: str) -> None:
    assert is_misspelling(wrong, name)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("ep", "tp"),
        ("keep_best", "keep_last"),
        ("max_tokens", "min_tokens"),
        ("top_k", "top_p"),
        ("host", "port"),
        ("num_train_gpus", "num_infer_gpus"),
        ("token_mask_low", "token_mask_high"),
        ("max_completion_tokens", "max_tokens"),
    ],
)
def test_another_word_is_not(wrong: str, name: str) -> None:
    assert not is_misspelling(wrong, name)


def test_options_of_other_trainers_are_answered_with_options(faults) -> None:
    assert faults(SFTConfig, "--max-seq-length", "512") == ["--max-seq-length: unknown option; use --data.seq-len"]
    assert faults(SFTConfig, "--learning_rate=1e-5") == ["--learning_rate: unknown option; use --optim.lr"]
    assert faults(RLConfig, "--lora-r", "8") == ["--lora-r: unknown option; use --trainer.model.lora.rank"]


@pytest.mark.parametrize("root", [SFTConfig, RLConfig], ids=lambda root: root.component)
def test_no_argument_of_transformers_is_taken_for_a_misspelling(root: type) -> None:
    """A key of another name is only suggested by the table. Otherwise it has the same name, in another section."""
    from transformers import TrainingArguments

    for field in fields(TrainingArguments):
        if field.name in root.model_fields:
            continue
        _, guess, suggested = line_for(root, field.name).partition("did you mean ")
        for key in suggested.rstrip("?").split(" or ") if guess else ():
            assert key.split(".")[-1] == field.name


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--orchestrator.env.0.args.failing", "--orchestrator.env.0.args failing=VALUE"),
        ("--orchestrator.client.headers-from-env.X-Key", "--orchestrator.client.headers-from-env X-Key=VALUE"),
    ],
)
def test_an_item_of_a_table_is_shown_in_the_form_that_works(option: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"the items of a table are given together: {re.escape(advice)}"):
        parse_argv(RLConfig, argv=[option, "true"])

    given, value = advice.replace("VALUE", "true").split()
    assert parse_argv(RLConfig, argv=[given, value])
