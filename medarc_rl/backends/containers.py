"""Runs a job's launcher in a container, with Apptainer or with Pyxis (`srun --container-image`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from medarc_rl.errors import UsageError

Runtime = Literal["apptainer", "pyxis"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)


@dataclass(frozen=True, slots=True)
class Container:
    """An image with Python and this package installed."""

    image: str
    """A file, or what the runtime pulls, such as `docker://...` or `nvcr.io#...`."""
    runtime: Runtime = "apptainer"
    mounts: tuple[str, ...] = ()
    """More directories, as `SOURCE` or `SOURCE:TARGET`."""

    def wrap(self, argv: Sequence[str], directory: Path, mounts: Sequence[Path]) -> tuple[str, ...]:
        """The command that runs `argv` in the container, in `directory`, with these directories in their own places.

        Raises:
            UsageError: the runtime's notation cannot hold the name of a directory.
        """
        if self.image.startswith("-"):
            raise UsageError(f"--container {self.image!r}: name an image")
        mapped = [*(_itself(path) for path in dict.fromkeys(mounts)), *self.mounts]
        if self.runtime == "pyxis":
            return (
                "srun",
                "--ntasks=1",
                f"--container-image={self.image}",
                f"--container-mounts={','.join(mapped)}",
                f"--container-workdir={directory}",
                *argv,
            )
        binds = (word for mount in mapped for word in ("--bind", mount))
        return ("apptainer", "exec", "--nv", *binds, "--pwd", str(directory), self.image, *argv)


def _itself(path: Path) -> str:
    if set(str(path)) & set(":,"):
        raise UsageError(f"{path}: containers cannot mount a directory with ':' or ',' in its name")
    return f"{path}:{path}"
