"""Finds what would stop a run at its start, before anything is loaded: the files, packages and programs it names."""

from prime_rl.checks.start import refuse_unstartable, start_faults
from prime_rl.checks.start_dir import NotDownloaded, NotInstalled

__all__ = ["NotDownloaded", "NotInstalled", "refuse_unstartable", "start_faults"]
