"""Lists keys of other versions of PRIME-RL, and the keys here that replace them.

Two readers: the hint for an unknown key, and `medarc_train migrate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from prime_rl.utils.pydantic_config.schema import Section, has_key

SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
SFT_COMMANDS = ("sft", "dpo", "rm")
"""The commands that SFT's loop trains for. The config of each has all keys of `sft`."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key, or a table with everything below it, that this version does not have."""

    old: str
    """Dotted key. Its first word is a component: `rl`, `sft`, `trainer`, `orchestrator`, `inference`, `eval`, or `*`
    for any. `*` elsewhere matches any text. An item of a list is written without its index."""
    new: tuple[str, ...] = ()
    """Keys that replace it, with their component; `*` is the component of `old`. Empty: nothing replaces it."""
    note: str = ""
    """What to know when moving the value; or, without `new`, why there is no such key."""
    value: Literal["same", "inverted", "rewrite"] = "same"
    """How the value moves: unchanged, as the opposite boolean, or by hand because it is built differently."""


def _moved(old: str, *new: str, note: str = "") -> Renamed:
    return Renamed(old, new, note)


def _inverted(old: str, new: str) -> Renamed:
    return Renamed(old, (new,), "with the opposite value", "inverted")


def _rewritten(old: str, *new: str, note: str) -> Renamed:
    return Renamed(old, new, note, "rewrite")


def _removed(old: str, note: str = "remove it") -> Renamed:
    return Renamed(old, (), note)


_OF_GROUPS = "a share of groups instead of rollouts"

OLDER: tuple[Renamed, ...] = (
    _moved("*.async_level", "*.max_async_level"),
    _moved("*.ckpt.keep", "*.ckpt.keep_last"),
    _moved("rl.clean", "rl.clean_output_dir"),
    _moved("sft.clean", "sft.clean_output_dir"),
    _moved("rl.dump_config", "rl.dry_run"),
    _moved("sft.dump_config", "sft.dry_run"),
    _removed("*.dump_config"),
    _moved("rl.slurm.dry_run", "rl.dry_run"),
    _moved("sft.slurm.dry_run", "sft.dry_run"),
    _rewritten("rl.teacher_gpu_ids", "rl.deployment.num_teacher_gpus", note="a count"),
    _rewritten("orchestrator.environment", "orchestrator.env", note="one [[env]] table for each environment"),
    _rewritten("orchestrator.environment_ids", "orchestrator.env", note="one [[env]] table for each environment"),
    _rewritten("orchestrator.environment_args", "orchestrator.env", note="`args` of each [[env]] table"),
    _rewritten("orchestrator.eval.environment", "orchestrator.eval.env", note="one [[env]] table for each environment"),
    _rewritten("orchestrator.eval.environment_ids", "orchestrator.eval.env", note="one table for each environment"),
    _rewritten("orchestrator.eval.environment_args", "orchestrator.eval.env", note="`args` of each table"),
    _moved("orchestrator.env_mix", "orchestrator.buffer.env_ratios"),
    _moved("*.model.experimental.lora", "*.model.lora"),
    _moved("*.loss.mask_ratio_low", "*.loss.token_mask_low"),
    _moved("*.loss.mask_ratio_high", "*.loss.token_mask_high"),
    _moved("*.loss.sequence_mask_ratio_low", "*.loss.sequence_mask_low"),
    _moved("*.loss.sequence_mask_ratio_high", "*.loss.sequence_mask_high"),
    _moved("*.loss.ref_tau", "*.loss.teacher_tau"),
    _moved("orchestrator.reference_model", "orchestrator.teacher_model"),
    _removed("orchestrator.trajectory_strategy"),
    _removed("orchestrator.workers_per_env"),
    _removed("orchestrator.max_env_worker_restarts"),
    _removed("orchestrator.mask_env_responses"),
    _removed("orchestrator.mask_truncated_completions"),
    _removed("orchestrator.zero_truncated_completions"),
    _removed("orchestrator.reload_weights_on_start"),
    _removed("orchestrator.env.log"),
    _moved("orchestrator.env.max_reward_errors", "orchestrator.env.max_failed_groups", note=_OF_GROUPS),
    _moved("orchestrator.eval.env.max_reward_errors", "orchestrator.eval.env.max_failed_groups", note=_OF_GROUPS),
    _moved("sft.eval.env.max_reward_errors", "sft.eval.env.max_failed_groups", note=_OF_GROUPS),
    _moved("eval.env.max_reward_errors", "eval.env.max_failed_groups", note=_OF_GROUPS),
    _removed("orchestrator.eval.save"),
    _rewritten("orchestrator.eval.retry", "orchestrator.eval.env.max_retries", note="in each [[eval.env]] table"),
    _removed("orchestrator.ckpt.buffer_path"),
    _rewritten(
        "orchestrator.buffer.type",
        "orchestrator.buffer.easy_threshold",
        "orchestrator.buffer.hard_threshold",
        "orchestrator.buffer.online_difficulty_filtering",
        note="`simple` is the default",
    ),
    _removed("*.model.load_using_meta"),
    _removed("*.client.server_type"),
    _removed("orchestrator.weights"),
    _rewritten(
        "trainer.weights",
        "trainer.ckpt.weights",
        "trainer.weight_broadcast",
        note="weights to keep, and weights for the inference servers",
    ),
    _rewritten("sft.weights", "sft.ckpt.weights", note="weights are exported with checkpoints"),
    _removed("*.weight_broadcast.adapter_only"),
    _removed("eval.use_tqdm"),
    _removed("eval.save", "remove it: results are always written to <output_dir>/eval"),
    _removed("eval.resume_path", "remove it: run again with the same output_dir to complete an evaluation"),
    _removed("eval.watcher", "evaluate during training with [orchestrator.eval]"),
)

NEWER: tuple[Renamed, ...] = (
    # Runs, checkpoints, monitors.
    _moved("*.run.dir", "*.output_dir"),
    _rewritten("*.run.name", "*.output_dir", note="a run is its directory; wandb.name names it for W&B"),
    _rewritten("*.run", "*.output_dir", note="a run is its directory"),
    _moved("*.resume.step", "*.ckpt.resume_step"),
    _removed("*.resume.dir", "a run resumes from its own output_dir"),
    _rewritten("*.resume", "*.ckpt.resume_step", note="-1 is the latest"),
    _removed("*.ckpt.skip_optimizer", "a checkpoint is always loaded with its optimizer"),
    _removed("*.ckpt.output_dir", "checkpoints are written to output_dir"),
    _moved("*.monitors.wandb", "*.wandb"),
    _removed("*.monitors.file", "remove it: metrics.jsonl is always written"),
    _removed("*.monitors.prime", "metrics go to metrics.jsonl and W&B"),
    _removed("*.monitors", "metrics go to metrics.jsonl, to W&B with [wandb], and to the sinks of [monitor]"),
    _removed("*.env_vars", "set environment variables outside the config"),
    _moved("rl.tokenizer", "trainer.tokenizer"),
    _moved("rl.rollout_transport", "trainer.rollout_transport", "orchestrator.rollout_transport"),
    _removed("rl.deployment.num_infer_replicas", "the number of copies follows from the GPUs and parallel.tp"),
    _removed("*.deployment.orchestrator_on_inference"),
    _moved("sft.deployment.num_train_gpus", "sft.deployment.num_gpus"),
    _moved("sft.deployment.num_train_nodes", "sft.deployment.num_nodes"),
    _moved("sft.deployment.num_eval_gpus", "sft.deployment.num_infer_gpus"),
    _removed("sft.deployment.num_infer_nodes", "the evaluation of sft runs on one node"),
    _removed("sft.deployment.num_eval_*", "the evaluation of sft runs on one node"),
    _rewritten("sft.eval.source", "sft.eval.env", note="environments are [[eval.env]] tables with `id` and `args`"),
    _moved("sft.eval.group_size", "sft.eval.rollouts_per_example"),
    _moved("sft.eval.env.group_size", "sft.eval.env.rollouts_per_example"),
    _moved("sft.eval.select.limit", "sft.eval.num_examples"),
    _moved("sft.eval.sampling.max_completion_tokens", "sft.eval.sampling.max_tokens"),
    _inverted("sft.eval.skip_first_step", "sft.eval.eval_base_model"),
    _removed("sft.eval.skip_eval_on_resume", "remove it: a resumed run evaluates what it has not evaluated yet"),
    _removed("sft.eval.skip_eval_on_restart", "remove it: a resumed run evaluates what it has not evaluated yet"),
    _removed("sft.eval.retrigger_on_resume", "remove it: a resumed run evaluates what it has not evaluated yet"),
    _removed("sft.eval.cancel_inflight_rollouts_on_eval", "remove it: sft trains on no rollouts"),
    _removed("sft.renderer", "samples are rendered with the tokenizer's chat template"),
    _removed("*.log.ranks_filter"),
    _removed("*.log.interval"),
    # Orchestrator.
    _moved("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    _moved("orchestrator.train.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens"),
    _moved("orchestrator.train.sampling", "orchestrator.sampling"),
    _rewritten(
        "orchestrator.train.source",
        "orchestrator.env",
        note="training environments are [[orchestrator.env]] tables with `id` and `args`",
    ),
    _rewritten(
        "orchestrator.train.env",
        "orchestrator.env",
        note="training environments are [[orchestrator.env]] tables with `id` and `args`",
    ),
    _rewritten(
        "orchestrator.train.filter_zero_advantages",
        "orchestrator.buffer.drop_equal_rewards",
        note="which replaces the groups that it drops",
    ),
    _removed("orchestrator.train"),
    _rewritten(
        "orchestrator.eval.source",
        "orchestrator.eval.env",
        note="eval environments are [[orchestrator.eval.env]] tables with `id` and `args`",
    ),
    _moved("orchestrator.eval.group_size", "orchestrator.eval.rollouts_per_example"),
    _moved("orchestrator.eval.env.group_size", "orchestrator.eval.env.rollouts_per_example"),
    _moved("orchestrator.eval.select.limit", "orchestrator.eval.num_examples"),
    _moved("orchestrator.eval.sampling.max_completion_tokens", "orchestrator.eval.sampling.max_tokens"),
    _inverted("orchestrator.eval.skip_first_step", "orchestrator.eval.eval_base_model"),
    _inverted("orchestrator.eval.retrigger_on_resume", "orchestrator.eval.skip_eval_on_resume"),
    *(
        _removed(
            f"orchestrator.sampling.{key}",
            f"it makes training off-policy: leave it out, or set extra_body = {{ {key} = ... }}, with a warning",
        )
        for key in ("presence_penalty", "frequency_penalty", "logit_bias", "bad_words")
    ),
    _moved("orchestrator.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens"),
    _rewritten("orchestrator.model.client.base_url", "orchestrator.client.base_url", note="a list"),
    _moved("orchestrator.model.client", "orchestrator.client"),
    _rewritten("orchestrator.algo", "orchestrator.advantage", note="the advantage function: docs/algorithms.md"),
    _rewritten(
        "orchestrator.concurrency",
        "orchestrator.max_inflight_rollouts",
        note="a fixed number of rollouts, not an adaptive one",
    ),
    _removed("orchestrator.renderer", "prompts are rendered with the tokenizer's chat template"),
    _moved("orchestrator.tokenizer", "trainer.tokenizer"),
    _removed("orchestrator.pad_to_multiple_of"),
    _removed("orchestrator.env_server_base_port"),
    _removed("orchestrator.collect_inference_metrics"),
    # Trainer.
    _rewritten("trainer.loss.dppo_mask_low", "trainer.loss.token_mask_low", note="a bound on the ratio"),
    _rewritten("trainer.loss.dppo_mask_high", "trainer.loss.token_mask_high", note="a bound on the ratio"),
    _rewritten(
        "*.model.fused_lm_head_token_chunk_size",
        "*.model.fused_lm_head_chunk_size",
        note="counted in vocabulary entries, not tokens",
    ),
    _removed("*.model.moe", "see model.moe_use_grouped_mm"),
    _rewritten(
        "*.model.offload",
        "*.model.fsdp_cpu_offload",
        "*.model.optim_cpu_offload",
        note="`full` and `optimizer`",
    ),
    _removed("trainer.gc"),
    _removed("trainer.matmul_precision"),
    _removed("trainer.enable_token_export", "orchestrator.save_rollouts writes the rollouts"),
    _rewritten("sft.data.source", "sft.data.name", note="one dataset; several stand in [[data.sources]]"),
    # Inference.
    _moved("inference.vllm.model", "inference.model.name"),
    _moved("inference.vllm.tensor_parallel_size", "inference.parallel.tp"),
    _moved("inference.vllm.data_parallel_size", "inference.parallel.dp"),
    _moved("inference.vllm.host", "inference.server.host"),
    _moved("inference.vllm.port", "inference.server.port"),
    *(
        _moved(f"inference.vllm.{key}", f"inference.model.{key}")
        for key in (
            "dtype",
            "max_model_len",
            "enforce_eager",
            "tool_call_parser",
            "reasoning_parser",
            "trust_remote_code",
            "chat_template",
            "language_model_only",
        )
    ),
    *(
        _moved(f"inference.vllm.{key}", f"inference.{key}")
        for key in (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "api_server_count",
            "seed",
            "enable_expert_parallel",
            "all2all_backend",
            "enable_eplb",
            "enable_sleep_mode",
            "enable_return_routed_experts",
        )
    ),
    _removed("inference.vllm.rope_scaling", "set it in the model's config.json"),
    _removed("inference.router", "one server is started; list several in orchestrator.client.base_url"),
    _removed("inference.deployment", "one server is started; its GPUs are deployment.num_infer_gpus of rl"),
    _removed("inference.kv_cache_offload"),
    _moved("inference.backend_port", "inference.server.port"),
    _removed("inference.slurm", "the server runs in the job of its run"),
    _removed("inference.dry_run"),
    # `evals`.
    _moved("eval.group_size", "eval.rollouts_per_example"),
    _moved("eval.sampling.max_completion_tokens", "eval.sampling.max_tokens"),
    _rewritten("eval.source", "eval.env", note="environments are [[env]] tables with `id` and `args`"),
)

_PER_STEP = "sequences per step, over all GPUs and accumulation"
_AT_ONCE = "sequences that a GPU computes at once; data.batch_size are those of a step"
_SPLIT = "a step is one batch, split over GPUs and accumulated as needed"
_EPOCHS = ("num_epochs", "num_train_epochs", "epochs")

_NF4, _INT8 = '"nf4", with [model.lora]', '"int8", with [model.lora]'

_OF_BOTH: tuple[tuple[str, str, str], ...] = (
    ("learning_rate", "optim.lr", ""),
    ("max_grad_norm", "optim.max_norm", ""),
    ("gradient_clipping", "optim.max_norm", ""),
    ("adam_beta1", "optim.betas1", ""),
    ("adam_beta2", "optim.betas2", ""),
    ("optimizer", "optim.type", "adamw, adamw8bit, adamw4bit, adafactor, sgd or muon"),
    ("lr_scheduler_type", "scheduler.type", "constant, linear or cosine"),
    ("lr_scheduler", "scheduler.type", "constant, linear or cosine"),
    ("num_warmup_steps", "scheduler.warmup_steps", ""),
    ("bf16", "model.compute_dtype", "bfloat16 is the default on a GPU"),
    ("torch_dtype", "model.compute_dtype", "the weights themselves have model.optimization_dtype"),
    ("gradient_checkpointing", "model.ac", "a table: [model.ac]"),
    ("tiled_mlp", "model.mlp_chunk_tokens", "tokens of a chunk, such as 2048"),
    ("attn_implementation", "model.attn", ""),
    ("flash_attention", "model.attn", "flash_attention_2 is the default"),
    ("torch_compile", "model.compile", "a table: [model.compile]"),
    ("lora_r", "model.lora.rank", ""),
    ("lora_rank", "model.lora.rank", ""),
    ("lora_alpha", "model.lora.alpha", ""),
    ("lora_dropout", "model.lora.dropout", ""),
    ("lora_target_modules", "model.lora.target_modules", ""),
    ("lora_modules_to_save", "model.lora.modules_to_save", ""),
    ("use_rslora", "model.lora.use_rslora", ""),
    ("use_dora", "model.lora.use_dora", ""),
    ("use_peft", "model.lora", "a table: [model.lora]"),
    ("peft_config", "model.lora", "a table: [model.lora]"),
    ("load_in_4bit", "model.quantization.type", _NF4),
    ("load_in_8bit", "model.quantization.type", _INT8),
    ("tokenizer_name", "tokenizer.name", ""),
    ("tokenizer_name_or_path", "tokenizer.name", ""),
    ("chat_template_path", "tokenizer.chat_template", ""),
    ("ddp_timeout", "dist_timeout_seconds", ""),
)
"""Name elsewhere, key of both trainers here, and a note if the value is another one."""

_OF_EVERY_RUN: tuple[tuple[str, str, str], ...] = (
    ("model_name_or_path", "model.name", ""),
    ("base_model", "model.name", ""),
    ("model_id", "model.name", ""),
    ("report_to", "wandb", "a table: [wandb]; metrics.jsonl is always written"),
    ("run_name", "wandb.name", ""),
    ("wandb_name", "wandb.name", ""),
    ("wandb_project", "wandb.project", ""),
    ("save_steps", "ckpt.interval", ""),
    ("save_total_limit", "ckpt.keep_last", ""),
    ("resume_from_checkpoint", "ckpt.resume_step", "a step; -1 is the latest"),
    ("overwrite_output_dir", "clean_output_dir", ""),
    ("log_level", "log.level", ""),
    ("save_strategy", "ckpt.interval", "a number of steps"),
    ("use_cpu", "device", '"cpu"'),
    ("load_best_model_at_end", "ckpt.keep_best", ""),
    ("early_stopping_patience", "early_stop.patience", ""),
    ("early_stopping_threshold", "early_stop.min_delta", ""),
)
"""Name elsewhere, key of `sft` and `rl` here, and a note if the value is another one."""

_SEED_OF_SFT = "of the shuffle"
_OF_SFT: tuple[tuple[str, str, str], ...] = (
    *(
        (old, "data.seq_len", "")
        for old in ("max_seq_length", "max_seq_len", "max_length", "sequence_len", "cutoff_len")
    ),
    ("per_device_train_batch_size", "data.micro_batch_size", _AT_ONCE),
    ("train_batch_size", "data.batch_size", _PER_STEP),
    ("global_batch_size", "data.batch_size", _PER_STEP),
    ("eval_steps", "val.interval", ""),
    ("eval_strategy", "val.interval", "a number of steps"),
    ("data_seed", "data.seed", ""),
    ("eval_dataset", "val.data.name", ""),
    ("dataset_name", "data.name", ""),
    ("dataset", "data.name", ""),
    ("train_dataset", "data.name", ""),
    ("train_file", "data.name", ""),
    ("dataset_config", "data.subsets", "a list"),
    ("dataset_train_split", "data.splits", "a list"),
    ("packing", "data.pack_function", "rows are always packed"),
    ("sample_packing", "data.pack_function", "rows are always packed"),
    ("train_on_inputs", "data.loss_mask", "the roles whose messages are trained on"),
    ("assistant_only_loss", "data.loss_mask", "assistant messages alone are the default"),
    ("seed", "data.seed", _SEED_OF_SFT),
    ("val_size", "val.size", "or val.fraction; for another file or split [val.data]"),
    ("val_set_size", "val.fraction", "or val.size, a number of rows; for another file or split [val.data]"),
    ("validation_split", "val.fraction", "or val.size, a number of rows; for another file or split [val.data]"),
    ("test_size", "val.fraction", "or val.size, a number of rows; for another file or split [val.data]"),
)

_KL_NAMES = ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta", "kl_penalty_coef")
_KL = "a penalty on the KL divergence from the starting model"

_OF_RL: tuple[tuple[str, str, str], ...] = (
    *((old, "trainer.loss.kl_coef", _KL) for old in _KL_NAMES),
    ("critic", "trainer.critic", "with algorithm = 'ppo'"),
    ("value_model", "trainer.critic.name", "with algorithm = 'ppo'"),
    ("lam", "trainer.critic.gae_lambda", ""),
    ("discount", "trainer.critic.gamma", ""),
    ("cliprange_value", "trainer.critic.value_clip", ""),
    ("critic_warmup", "trainer.critic.warmup_steps", ""),
    ("metric_for_best_model", "orchestrator.eval.metric", ""),
    ("seed", "orchestrator.seed", ""),
    ("max_seq_length", "seq_len", ""),
    ("num_generations", "orchestrator.rollouts_per_example", ""),
    ("max_completion_length", "orchestrator.sampling.max_tokens", "per turn"),
    ("per_device_train_batch_size", "orchestrator.batch_size", "rollouts per step, over all GPUs"),
    ("train_batch_size", "orchestrator.batch_size", "rollouts per step, over all GPUs"),
    ("reward_funcs", "orchestrator.env", "rewards belong to the environment"),
    ("vllm_gpu_memory_utilization", "inference.gpu_memory_utilization", ""),
    ("vllm_tensor_parallel_size", "inference.parallel.tp", ""),
)

_QUANTIZATION_CONFIG = (
    'set model.quantization = "nf4" or "int8", with [model.lora]; `--estimate` says how much memory is needed'
)
_PIPELINE = "there is no pipeline parallelism: divide layers with model.tp, rows with model.cp, experts with model.ep"
_NOT_HERE: tuple[tuple[str, str], ...] = (
    ("fp16", "float16 is not supported; bfloat16 is the default on a GPU"),
    ("quantization_config", _QUANTIZATION_CONFIG),
    ("adam_epsilon", "AdamW's epsilon is PyTorch's default, 1e-8"),
    ("logging_steps", "remove it: every step is logged"),
    ("logging_dir", "remove it: logs are in <output_dir>/logs"),
    ("fsdp", "remove it: FSDP2 is always used"),
    ("fsdp_config", "remove it: FSDP2 is always used"),
    ("deepspeed", "remove it: FSDP2 is always used"),
    ("push", "upload <output_dir>/weights/step_<n> with `hf upload`"),
    ("push_to_hub", "upload <output_dir>/weights/step_<n> with `hf upload`"),
    ("hub_model_id", "upload <output_dir>/weights/step_<n> with `hf upload`"),
    ("dataloader_num_workers", "remove it"),
    ("remove_unused_columns", "remove it"),
    ("disable_tqdm", "remove it"),
    ("do_train", "remove it"),
    ("greater_is_better", "remove it: a loss is better if lower, a score if higher"),
    ("debug", "remove it"),
)
"""Names that `sft` and `rl` need no key for, and why."""


def _elsewhere(component: str, entry: tuple[str, str, str], prefix: str = "") -> Renamed:
    old, key, note = entry
    new = f"{prefix or component}.{key}"
    return _rewritten(f"{component}.{old}", new, note=note) if note else _moved(f"{component}.{old}", new)


OTHER_TRAINERS: tuple[Renamed, ...] = (
    *(
        _moved(f"{component}.optim.{old}", f"{component}.optim.{new}")
        for component in ("trainer", "sft")
        for old, new in (("learning_rate", "lr"), ("max_grad_norm", "max_norm"), ("grad_clip", "max_norm"))
    ),
    *(_elsewhere(component, entry) for component in ("sft", "trainer") for entry in _OF_BOTH),
    *(_elsewhere("rl", entry, prefix="trainer") for entry in _OF_BOTH),
    *(_elsewhere(component, entry) for component in ("sft", "rl") for entry in _OF_EVERY_RUN),
    *(_elsewhere("sft", entry) for entry in _OF_SFT),
    *(_elsewhere("rl", entry) for entry in _OF_RL),
    _removed("sft.metric_for_best_model", "remove it: the validation loss decides"),
    *(_removed(f"{component}.{old}", why) for component in ("sft", "rl") for old, why in _NOT_HERE),
    *(_rewritten(f"trainer.loss.{old}", "trainer.loss.kl_coef", note=_KL) for old in _KL_NAMES if old != "kl_coef"),
    *(
        _removed(f"{part}.model.{old}", _PIPELINE)
        for part in ("sft", "trainer")
        for old in ("pp", "pp_size", "pipeline_parallel_size")
    ),
    *(
        _removed(f"{component}.model.quantization_config", _QUANTIZATION_CONFIG)
        for component in ("sft", "trainer", "rl")
    ),
    *(
        _rewritten(f"{part}.model.{old}", f"{part}.model.quantization.type", note=note)
        for part in ("sft", "trainer")
        for old, note in (("load_in_4bit", _NF4), ("load_in_8bit", _INT8))
    ),
    _removed("rl.gpus", "use --train-gpus N and --infer-gpus N; CUDA_VISIBLE_DEVICES says which"),
    _removed("sft.gradient_accumulation_steps", f"{_SPLIT}: see data.batch_size and data.micro_batch_size"),
    _removed("rl.gradient_accumulation_steps", f"{_SPLIT}: see orchestrator.batch_size"),
    _removed("rl.max_prompt_length", "prompts are not cut: seq_len bounds prompt and answer together"),
    *(_removed(f"rl.{old}", "rl counts steps: set max_steps") for old in _EPOCHS),
    *(_moved(f"sft.{old}", "sft.num_epochs") for old in _EPOCHS if old != "num_epochs"),
    *(_moved(f"dpo.{key}", f"dpo.loss.{key}") for key in ("beta", "label_smoothing", "simpo_gamma", "rpo_alpha")),
    *(_moved(f"dpo.{key}", f"dpo.loss.{key}") for key in ("desirable_weight", "undesirable_weight")),
    _moved("sft.loss_type", "sft.loss"),
    _moved("dpo.loss_type", "dpo.loss.type"),
    _moved("dpo.cpo_alpha", "dpo.loss.rpo_alpha"),
    _removed("dpo.precompute_ref_log_probs", "remove it: they are always computed once, before the first step"),
    _moved("dpo.ref_model", "dpo.reference.name"),
)
"""Names of TRL, axolotl and Transformers' Trainer, at the top of a config."""

RENAMED: tuple[Renamed, ...] = (*OLDER, *NEWER, *OTHER_TRAINERS)
"""A key is looked up with its whole path first, then with the tables around it; of equal lengths the first entry is
taken."""


def split_component(component: str, key: str) -> tuple[str, str]:
    """The component that owns `key` (dotted, from the root of `component`), and the key from there.

    `trainer.optim.lr` of `rl` is `optim.lr` of `trainer`.
    """
    head, _, rest = key.partition(".")
    if component in ("rl", "eval") and rest and head.removeprefix("teacher_") in SECTIONS_OF_RL:
        return head.removeprefix("teacher_"), rest
    if component in SFT_COMMANDS and rest and head == "inference":
        return head, rest
    return component, key


_EXACT = frozenset(entry.old for entry in RENAMED)


def is_current(root: Section, component: str, path: Sequence[str]) -> bool:
    """Whether `root`, the config of `component`, has a key, and no other one replaces it.

    Every key exists inside a dict, but `[inference.vllm]` refuses the names that other keys set.
    """
    owner, key = split_component(component, ".".join(path))
    parts = [owner, *key.split(".")]
    return has_key(root, path) and not any(".".join(parts[:length]) in _EXACT for length in range(2, len(parts) + 1))


def find_renamed(component: str, key: str) -> tuple[Renamed, str] | None:
    """The entry for `key` of a component, or for a table around it; and the part of `key` below that table.

    None if no version that we know of has the key.
    """
    # A name of `sft` is one of `dpo` and `rm` too, which have all of its keys.
    for owner in (component, "sft") if component in SFT_COMMANDS else (component,):
        parts = [owner, *key.split(".")]
        for length in range(len(parts), 1, -1):
            table = ".".join(parts[:length])
            for entry in RENAMED:
                if fnmatchcase(table, entry.old):
                    return entry, ".".join(parts[length:])
    return None


def hint_for_renamed(root: Section, component: str, key: str, as_flag: bool = False) -> str | None:
    """What to write instead of `key`, which is dotted and belongs to `root`, the config of `component`.

    None if no other version has the key. With `as_flag`, keys look like options.
    """
    owner, rest = split_component(component, key)
    found = find_renamed(owner, rest)
    if found is None:
        return None
    entry, below = found
    if not entry.new:
        return entry.note
    prefix = key[: len(key) - len(rest)]
    places = [_place(root, component, owner, prefix, new.replace("*", owner, 1)) for new in entry.new]
    if not all(where or has_key(root, table.split(".")) for table, where in places):
        return None
    tables = [_shown(table, where, as_flag) for table, where in places]
    if entry.value == "same" and below:
        if not all(where or has_key(root, f"{table}.{below}".split(".")) for table, where in places):
            return f"{key.removesuffix(f'.{below}')} is {_joined(tables)} here, which has no {below}"
        tables = [_shown(f"{table}.{below}", where, as_flag) for table, where in places]
    return f"use {_joined(tables)}" + (f" ({entry.note})" if entry.note else "")


def _place(root: Section, component: str, owner: str, prefix: str, new: str) -> tuple[str, str]:
    """Return `new`, which starts with its component, as a key of `root`; and where it is if `root` does not have it."""
    target, _, key = new.partition(".")
    if target == owner:
        return prefix + key, ""
    if target == component or (target == "sft" and component in SFT_COMMANDS):
        return key, ""
    return (new, "") if target in root.model_fields else (key, f" in the config of {target}")


def _shown(key: str, where: str, as_flag: bool) -> str:
    return (f"--{key.replace('_', '-')}" if as_flag else key) + where


def _joined(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
