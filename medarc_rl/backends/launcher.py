"""Makes the job that a back-end submits: one launcher on the first node, which plans the run's processes there."""

from __future__ import annotations

from prime_rl.launch.job import Job, Resources
from prime_rl.launch.spec import ProcessSpec
from prime_rl.run.paths import RunPaths

LAUNCHERS = {"sft": "medarc_rl.launchers.sft_local", "rl": "medarc_rl.launchers.rl_local"}
CONFIGS = {"sft": "trainer", "rl": "rl"}
"""Name of the resolved config in `OUT/configs` that the launcher reads."""


def launcher_job(command: str, paths: RunPaths, resources: Resources, queued: RunPaths | None = None) -> Job:
    """A job whose only process launches `command` on the first of its nodes. It starts an agent on each.

    Its config is that of the run, or the one in `queued`.

    GPU ids, ports and scratch directories are only known on the node, so the launcher chooses them.
    """
    argv = ("python", "-m", LAUNCHERS[command], "@", str((queued or paths).config(CONFIGS[command])))
    launcher = ProcessSpec(command, argv, paths.log(command), completes_run=True)
    return Job(command, paths, (launcher,), resources)
