"""The examples at the end of each command's help page. `tests/test_command_line.py` checks that they parse."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "medarc_train sft": (
        "medarc_train sft examples/reverse_text/sft_cpu.toml --output-dir outputs/rt-sft",
        "medarc_train sft @ examples/reverse_text/sft_cpu.toml --optim.lr 1e-3 --resume latest",
        "medarc_train sft @ examples/reverse_text/sft.toml --estimate --gpu H100",
    ),
    "medarc_train rl": (
        "medarc_train rl examples/reverse_text/rl_cpu.toml --output-dir outputs/rt",
        "medarc_train rl @ examples/reverse_text/rl_single.toml --single-gpu --max-steps 40",
        "medarc_train rl examples/med_calc/rl_cpu.toml --preflight",
    ),
    "medarc_train eval": ("medarc_train eval examples/med_calc/eval_cpu.toml --output-dir outputs/med-calc-eval",),
    "medarc_train passk": (
        "medarc_train passk examples/med_questions/eval_cpu.toml --attempts 8 --output-dir outputs/med-pass",
        "medarc_train passk examples/med_questions/eval_cpu.toml --output-dir outputs/med-pass --curriculum order.txt "
        "--order easy --min-pass-rate 0.1 --max-pass-rate 0.9",
    ),
    "medarc_train explain": (
        "medarc_train explain examples/reverse_text/rl_cpu.toml trainer.optim.lr",
        "medarc_train explain outputs/rt --diff examples/reverse_text/rl_cpu.toml --json",
    ),
    "medarc_train chat": (
        "medarc_train chat outputs/rt",
        'medarc_train chat outputs/rt/weights/step_80 --no-base --prompt "hello there"',
    ),
    "medarc_train watch": (
        "medarc_train watch outputs/rt",
        "medarc_train watch outputs/rt --once --json",
    ),
    "medarc_train report": (
        "medarc_train report outputs/rt",
        "medarc_train report outputs/seed0 outputs/seed1",
    ),
    "medarc_train rollouts": (
        "medarc_train rollouts outputs/rt --step 20 --worst 5",
        "medarc_train rollouts outputs/rt --step last --json",
    ),
    "medarc_train trace": ("medarc_train trace outputs/rt --out rt.json",),
    "medarc_train upload": (
        "medarc_train upload outputs/rt",
        "medarc_train upload outputs/rt --to s3://bucket/runs/rt --no-samples",
    ),
    "medarc_train lm-eval": (
        "medarc_train lm-eval outputs/rt --tasks gsm8k,ifeval --num-fewshot 4",
        "medarc_train lm-eval outputs/rt --tasks arc_easy --watch --limit 200",
    ),
    "medarc_train env new": (
        "medarc_train env new medqa",
        "medarc_train env new dosing --kind tools --directory environments",
    ),
    "medarc_train env check": (
        "medarc_train env check reverse-text",
        "medarc_train env check environments/dosing --rows 20 --json",
    ),
    "medarc_train env try": (
        "medarc_train env try reverse-text --model examples/reverse_text/checkpoint --max-tokens 40",
        "medarc_train env try dosing --model Qwen/Qwen3-0.6B -n 10 --html dosing.html",
    ),
    "medarc_train env install": (
        "medarc_train env install examples/reverse_text/environment",
        "medarc_train env install medqa==0.1.4 --own",
    ),
    "medarc_train env list": ("medarc_train env list", "medarc_train env list --json"),
    "medarc_train env uninstall": ("medarc_train env uninstall reverse-text",),
    "medarc_train migrate": ("medarc_train migrate old.toml",),
    "medarc_slurm sft": (
        "medarc_slurm sft examples/reverse_text/sft.toml --gpus 2 --output-dir outputs/rt-sft",
        "medarc_slurm sft @ examples/reverse_text/sft.toml --dry-run",
    ),
    "medarc_slurm rl": (
        "medarc_slurm rl examples/reverse_text/rl_slurm.toml --single-gpu --output-dir outputs/rt",
        "medarc_slurm rl examples/reverse_text/rl_slurm.toml --train-gpus 1 --infer-gpus 1 --requeue",
    ),
    "medarc_slurm check": ("medarc_slurm check rl examples/reverse_text/rl_slurm.toml --single-gpu --json",),
    "medarc_slurm status": ("medarc_slurm status last",),
    "medarc_slurm logs": ("medarc_slurm logs 123 -f",),
    "medarc_slurm cancel": ("medarc_slurm cancel rl_slurm-rl",),
    "medarc_submit sft": (
        "medarc_submit sft examples/reverse_text/sft.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--gpus 2 --output-claim runs --dry-run",
        "medarc_submit sft examples/reverse_text/sft.toml --to sagemaker --build --instance-type ml.g5.2xlarge --wait",
        "medarc_submit sft examples/reverse_text/sft_cpu.toml --to sagemaker --local --image medarc-rl:dev",
        "medarc_submit sft examples/reverse_text/sft_cpu.toml --to ray --wait",
    ),
    "medarc_submit sagemaker-policy": (
        "medarc_submit sagemaker-policy --role arn:aws:iam::123456789012:role/training --s3 s3://my-bucket/runs",
    ),
    "medarc_submit rl": (
        "medarc_submit rl examples/reverse_text/rl_slurm.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--output-claim runs --secret-env HF_TOKEN=hub/token",
    ),
    "medarc_submit eval": (
        "medarc_submit eval examples/med_calc/eval_cpu.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--gpus 0 --output-claim runs --wait",
    ),
    "medarc_jobs list": ("medarc_jobs list", "medarc_jobs list --to slurm --json"),
    "medarc_jobs status": ("medarc_jobs status last",),
    "medarc_jobs logs": ("medarc_jobs logs last -f", "medarc_jobs logs rt-sft --tail 100"),
    "medarc_jobs cancel": ("medarc_jobs cancel rt-sft",),
    "medarc_jobs wait": ("medarc_jobs wait last", "medarc_jobs wait rt-sft rt-rl --timeout 3600"),
}


def examples_text(program: str, command: str) -> str | None:
    """The end of a help page. Programs are started with `uv run`, unless the environment is active."""
    lines = EXAMPLES.get(f"{program} {command}")
    # The first line keeps Typer from joining the others.
    return None if lines is None else "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
