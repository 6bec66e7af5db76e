"""The directory that a run starts in, and what can be known of it from here."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.storage import is_on_s3
from prime_rl.utils.errors import DeviceError
from prime_rl.utils.gpus import usable_gpus


class NotInstalled(str):
    """A line about a package that is missing in this environment. A dry run only warns: the run may be elsewhere."""

    __slots__ = ()


class NotDownloaded(str):
    """A line about a model's file that is not in its folder. An estimate reads only `config.json`, and goes on."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StartDir:
    """Directory in which the processes of a run will start; relative paths are relative to it."""

    path: Path = Path()
    is_here: bool = True
    """The run starts on this machine, in this Python environment.

    False for a batch job. Its machine shares file systems with this one, but may have its own disks: a path is
    known to be missing only if its parent directory exists here.
    """

    @classmethod
    def of_job(cls, project_dir: Path) -> StartDir:
        """The start of a batch job that runs in `project_dir`."""
        return cls(project_dir, is_here=False)

    @property
    def has_our_packages(self) -> bool:
        """Whether the run imports what this interpreter imports. A batch job uses the `.venv` of its project."""
        return self.is_here or Path(sys.prefix).resolve() == (self.path / ".venv").resolve()

    def no_environment(self, line: str) -> str:
        """A line about an environment that is not installed. A dry run here would load it, so it does not go on."""
        return line if self.is_here else NotInstalled(line)

    def find(self, name: str | Path) -> Path:
        """`name` as seen from here."""
        return self.path / name

    def lacks(self, name: str | Path) -> bool:
        """Whether nothing can be at `name` when the run starts."""
        path = self.find(name)
        return not path.exists() and (self.is_here or path.parent.is_dir())


def gpus_here() -> bool:
    """Whether a launch on this machine would use GPUs, found without torch."""
    try:
        return bool(usable_gpus(os.environ))
    except DeviceError:  # the launcher says what is wrong with CUDA_VISIBLE_DEVICES
        return True


def looks_like_path(name: str) -> bool:
    """Whether `name` can be neither a hub id, `owner/name` or `name`, nor a name on S3."""
    return not is_on_s3(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1)
