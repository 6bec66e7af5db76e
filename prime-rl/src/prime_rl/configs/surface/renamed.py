"""Keys that earlier and later versions of PRIME-RL have, and what to write here instead."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

COMPONENTS = ("trainer", "orchestrator", "inference")

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        # Earlier versions. A key starts with the component that had it; `*` stands for anything.
        "*.async_level": "it is now max_async_level",
        "*.ckpt.keep": "it is now ckpt.keep_last (and ckpt.keep_interval)",
        "rl.teacher_gpu_ids": "it is now deployment.num_teacher_gpus",
        "rl.clean": "it is now clean_output_dir",
        "sft.clean": "it is now clean_output_dir",
        "*.dump_config": "it is now dry_run",
        "*.slurm.dry_run": "it is now dry_run, at the top",
        "orchestrator.environment*": "environments are now [[orchestrator.env]] tables (and [[orchestrator.eval.env]])",
        "orchestrator.eval.environment*": "environments are now [[orchestrator.eval.env]] tables",
        "orchestrator.env_mix": "it is now orchestrator.buffer.env_ratios",
        "*.model.experimental": "model.experimental.lora is now model.lora",
        "*.loss.mask_ratio_*": "they are now loss.token_mask_low and loss.token_mask_high",
        "*.loss.sequence_mask_ratio_*": "they are now loss.sequence_mask_low and loss.sequence_mask_high",
        "*.loss.ref_tau": "it is now loss.teacher_tau",
        "*.reference_model": "it is now teacher_model",
        "orchestrator.trajectory_strategy": "nothing replaces it: remove it",
        "orchestrator.workers_per_env": "nothing replaces it: remove it",
        "orchestrator.max_env_worker_restarts": "nothing replaces it: remove it",
        "orchestrator.mask_env_responses": "nothing replaces it: remove it",
        "orchestrator.mask_truncated_completions": "nothing replaces it: remove it",
        "orchestrator.zero_truncated_completions": "nothing replaces it: remove it",
        "orchestrator.reload_weights_on_start": "nothing replaces it: remove it",
        "orchestrator.env.log": "nothing replaces it: remove it",
        "orchestrator.eval.save": "nothing replaces it: remove it",
        "orchestrator.eval.retry": "nothing replaces it: remove it (eval.env has max_retries)",
        "orchestrator.ckpt.buffer_path": "nothing replaces it: remove it",
        "orchestrator.buffer.type": "nothing replaces it: set buffer.easy_threshold and hard_threshold, "
        "or buffer.online_difficulty_filtering",
        "*.model.load_using_meta": "nothing replaces it: remove it",
        "*.client.server_type": "nothing replaces it: remove it",
        "orchestrator.weights": "nothing replaces it: remove it",
        "trainer.weights": "exported weights are now ckpt.weights, weights for inference weight_broadcast",
        "sft.weights": "exported weights are now ckpt.weights",
        "*.weight_broadcast.adapter_only": "nothing replaces it: remove it",
        "eval.use_tqdm": "nothing replaces it: remove it",
        "eval.save": "results are always in <output_dir>/eval: remove it",
        "eval.resume_path": "start it again with the same output_dir: what is there is not done again",
        "eval.watcher": "nothing replaces it: evaluate during training with orchestrator.eval",
        # Later versions.
        "*.run": "a run is its output_dir here: set that (and wandb.name)",
        "*.resume": "it is ckpt.resume_step here (-1 is the latest)",
        "*.ckpt.skip_optimizer": "not here: remove it",
        "*.ckpt.output_dir": "checkpoints are in output_dir here: remove it",
        "*.monitors.wandb": "it is wandb here",
        "*.monitors.prime": "it is orchestrator.prime_monitor here",
        "*.monitors": "metrics.jsonl is always written here: remove it",
        "*.env_vars": "not here: set environment variables outside",
        "rl.tokenizer": "it is trainer.tokenizer here",
        "rl.rollout_transport": "it is trainer.rollout_transport and orchestrator.rollout_transport here",
        "rl.deployment.num_infer_replicas": "not here: every GPU of a server is used",
        "rl.deployment.orchestrator_on_inference": "not here: remove it",
        "sft.deployment.num_train_gpus": "it is deployment.num_gpus here",
        "sft.deployment.num_train_nodes": "it is deployment.num_nodes here",
        "orchestrator.group_size": "it is orchestrator.rollouts_per_example here",
        "orchestrator.train.sampling.max_completion_tokens": "it is orchestrator.sampling.max_tokens here",
        "orchestrator.train.sampling": "it is orchestrator.sampling here",
        "orchestrator.train": "training environments are [[orchestrator.env]] tables here, with `id` and `args`",
        "orchestrator.eval.source": "eval environments are [[orchestrator.eval.env]] tables here",
        "orchestrator.eval.skip_first_step": "it is orchestrator.eval.eval_base_model = false here",
        "orchestrator.eval.retrigger_on_resume": "it is orchestrator.eval.skip_eval_on_resume = false here",
        "orchestrator.model.client": "it is orchestrator.client here",
        "orchestrator.algo": "it is algorithm, at the top of the rl config, here",
        "orchestrator.concurrency": "it is orchestrator.max_inflight_rollouts here",
        "orchestrator.renderer": "not here: remove it",
        "orchestrator.tokenizer": "it is trainer.tokenizer here",
        "orchestrator.collect_inference_metrics": "not here: remove it",
        "*.loss.dppo_mask_low": "it is loss.token_mask_low here, a bound on the ratio",
        "*.loss.dppo_mask_high": "it is loss.token_mask_high here, a bound on the ratio",
        "*.fused_lm_head_token_chunk_size": "it is model.fused_lm_head_chunk_size here, counted in vocabulary entries",
        "inference.vllm.model": "it is inference.model.name here",
        "inference.vllm.tensor_parallel_size": "it is inference.parallel.tp here",
        "inference.vllm.data_parallel_size": "it is inference.parallel.dp here",
        "inference.vllm": "vLLM's settings are keys of inference and inference.model here; pass others to `inference` "
        "as options",
        "inference.backend_port": "it is inference.server.port here",
        "*.log.ranks_filter": "not here: remove it",
        "*.log.interval": "not here: remove it",
        # Words of other trainers.
        "*.optim.learning_rate": "it is optim.lr here",
        "*.optim.max_grad_norm": "it is optim.max_norm here",
        "*.optim.grad_clip": "it is optim.max_norm here",
    }
)


def new_name(component: str, key: str) -> str | None:
    """What to write instead of `key` (dotted, from the root of `component`); None if it never was a key."""
    parts = key.split(".")
    if component == "rl" and len(parts) > 1 and parts[0] in (*COMPONENTS, "teacher_inference"):
        parts[0] = parts[0].removeprefix("teacher_")
    else:
        parts = [component, *parts]
    # A key below a renamed table was renamed with it.
    tables = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return next((RENAMED[pattern] for pattern in RENAMED for table in tables if fnmatchcase(table, pattern)), None)
