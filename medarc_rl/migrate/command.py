"""The command `medarc_train migrate`."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from medarc_rl.errors import MedarcError, UsageError

Kind = Literal["rl", "sft", "eval", "trainer", "orchestrator", "inference"]

INCOMPLETE = 1
"""Exit code when something was not carried."""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file of another version of PRIME-RL.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; by default, stdout.")] = None,
    kind: Annotated[
        Kind | None, typer.Option("--as", help="Command that the file is for; by default, found from its keys.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Change FILE itself and keep the old one as FILE.bak.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file that is written, or FILE.bak.")] = False,
) -> int:
    """Rewrite a config of another version of PRIME-RL for this one.

    The new file goes to stdout, a report to stderr. Settings that cannot be carried are listed in the report and become
    comments in the new file. Exit code: 0 if everything was carried, 1 if something was not, 2 if FILE is not a config.
    """
    # Imported here so that the other commands do not load it.
    from medarc_rl.migrate.rules import migrate

    if in_place and output is not None:
        raise UsageError("--in-place and --output exclude each other: give one")
    if output is not None:
        _check_output(file, output, force)
    migration = migrate(file, kind)
    sys.stderr.writelines(f"{line}\n" for line in migration.report)
    with _one_line_for_os_errors():
        if in_place:
            _change(file, migration.text, force)
        elif output is not None:
            output.write_bytes(migration.text.encode())
        else:
            sys.stdout.write(migration.text)
    return 0 if migration.complete else INCOMPLETE


def _check_output(file: Path, output: Path, force: bool) -> None:
    if output.is_dir():
        raise UsageError(f"{output}: a directory")
    if output.exists() and file.exists() and output.samefile(file):
        raise UsageError(f"{output}: this is the file to read: use --in-place to change it")
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already: use --force to overwrite it")


def _change(file: Path, text: str, force: bool) -> None:
    """Replace the content of the file and keep the old content in FILE.bak. Does nothing if the content is equal."""
    old = file.read_bytes()
    if old == text.encode():
        return
    backup = file.with_name(f"{file.name}.bak")
    if backup.exists() and not force:
        raise UsageError(f"{backup}: exists already: use --force to overwrite it")
    # With the file's own rights: it may hold what others must not read.
    backup.unlink(missing_ok=True)
    backup.touch(stat.S_IMODE(file.stat().st_mode))
    backup.write_bytes(old)
    file.write_bytes(text.encode())


@contextmanager
def _one_line_for_os_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MedarcError(f"{error.filename}: {error.strerror}") from None
