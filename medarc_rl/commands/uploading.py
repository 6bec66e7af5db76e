"""The command `medarc_train upload`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from medarc_rl.cli import say
from medarc_rl.errors import MedarcError, UsageError


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory.")]
    to: Annotated[
        str | None, Option(metavar="s3://BUCKET/PREFIX", help="Where to; by default where the run was copied before.")
    ] = None
    no_samples: Annotated[bool, Option("--no-samples", help="Leave out kept rollouts and results of evaluations.")] = (
        False
    )


def upload(options: UploadOptions) -> int:
    """Upload what S3 lacks of a run: metrics, logs, checkpoints, weights, kept rollouts, receipts.

    Nothing is deleted on S3. Exit code: 0 if everything is there, 1 if something is missing.
    """
    from prime_rl.configs.storage import BadS3Name, S3Name
    from prime_rl.run.paths import RunPaths
    from prime_rl.storage.copies import upload_run
    from prime_rl.utils.errors import UserError

    if not options.run.is_dir():
        raise UsageError(f"RUN: {options.run} is not a directory")
    try:
        target = None if options.to is None else S3Name.of(options.to)
        if options.to is not None and target is None:
            raise UsageError(f"--to {options.to}: write s3://BUCKET/PREFIX")
        is_whole, line = upload_run(RunPaths(options.run.absolute()), target, not options.no_samples, say)
    except (BadS3Name, UserError) as error:
        raise UsageError(str(error)) from error
    if not is_whole:
        raise MedarcError(*line.splitlines())
    say(line)
    return 0
