"""`medarc_train`: train, evaluate and look after runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from medarc_rl.cli import Group, Lazy, new_app

COMMANDS: Mapping[str, Lazy | Group] = {
    "sft": Lazy(
        "medarc_rl.running:run_sft",
        "Run supervised fine-tuning.",
        options="medarc_rl.launchers.options:SftOptions",
        takes_config=True,
    ),
    "dpo": Lazy(
        "medarc_rl.running:run_dpo",
        "Train on preferences: DPO and its variants.",
        options="medarc_rl.launchers.options:DpoOptions",
        takes_config=True,
    ),
    "rm": Lazy(
        "medarc_rl.running:run_rm",
        "Train a reward model on preferences.",
        options="medarc_rl.launchers.options:RmOptions",
        takes_config=True,
    ),
    "rl": Lazy(
        "medarc_rl.running:run_rl",
        "Run reinforcement learning: inference server, orchestrator and trainer.",
        options="medarc_rl.launchers.options:RlOptions",
        takes_config=True,
    ),
    "eval": Lazy(
        "medarc_rl.running:run_eval",
        "Evaluate a model and its checkpoints.",
        options="medarc_rl.launchers.options:EvalOptions",
        takes_config=True,
    ),
    "passk": Lazy(
        "medarc_rl.commands.passing:passk",
        "Measure pass@k of a model on each prompt of its environments, and write a table and a curriculum.",
    ),
    "explain": Lazy(
        "medarc_rl.explain.command:explain",
        "Show where each value of a config comes from: `explain CONFIG [KEY] [options]`.",
    ),
    "chat": Lazy("medarc_rl.commands.chat:chat", "Chat with trained weights."),
    "watch": Lazy(
        "medarc_rl.commands.runs:watch",
        "Watch a run until it ends: state, step, metrics, what each process does, last warnings.",
    ),
    "report": Lazy(
        "medarc_rl.report.command:report",
        "Write a report of a run, or a comparison of several: one HTML file, and PNGs of its charts.",
    ),
    "rollouts": Lazy(
        "medarc_rl.rollouts.command:rollouts",
        "Show kept rollouts of a run: `rollouts RUN --step 20 --worst 5`.",
    ),
    "trace": Lazy(
        "medarc_rl.commands.runs:trace",
        "Merge what the processes of a run recorded with [trace] into one timeline for Perfetto.",
    ),
    "upload": Lazy(
        "medarc_rl.commands.runs:upload",
        "Upload the files of a run that are not on S3 yet: metrics, logs, checkpoints, weights, kept rollouts, "
        "receipts.",
    ),
    "lm-eval": Lazy(
        "medarc_rl.lm_eval.command:lm_eval",
        "Evaluate weights with lm-evaluation-harness: each checkpoint of a run next to its base model.",
        options="medarc_rl.lm_eval.options:LmEvalOptions",
    ),
    "migrate": Lazy(
        "medarc_rl.migrate.command:command",
        "Rewrite a config of another version of PRIME-RL for this one.",
    ),
    "env": Group(
        {
            "new": Lazy(
                "medarc_rl.environments.making:new",
                "Write the package of a new environment: `env new medqa --kind tools`.",
                options="medarc_rl.environments.options:NewOptions",
            ),
            "check": Lazy(
                "medarc_rl.environments.trying:check",
                "Look at an environment's dataset, and try its rewards on scripted answers: `env check medqa`.",
                options="medarc_rl.environments.options:CheckOptions",
            ),
            "try": Lazy(
                "medarc_rl.environments.trying:try_",
                "Roll out a few examples, and show the conversations and their rewards: `env try medqa --model MODEL`.",
                options="medarc_rl.environments.options:TryOptions",
            ),
            "install": Lazy(
                "medarc_rl.environments.installing:install",
                "Install an environment for this user's runs: `env install ./medqa`.",
                options="medarc_rl.environments.options:InstallOptions",
            ),
            "list": Lazy(
                "medarc_rl.environments.installing:list_environments",
                "List the environments that runs find by id: installed ones, and those of the run's own interpreter.",
                options="medarc_rl.environments.options:ListOptions",
            ),
            "uninstall": Lazy(
                "medarc_rl.environments.installing:uninstall",
                "Remove an environment that `env install` has installed.",
                options="medarc_rl.environments.options:UninstallOptions",
            ),
        },
        "Make, check, try and install environments.",
    ),
}
"""`tests/test_import_cost.py` checks that each summary is the first sentence of the command's help."""

app = new_app("medarc_train", "Train here: on this machine's GPUs, or on its CPU.", COMMANDS)


def main() -> None:
    app()
