"""The commands of `medarc_train env`."""

from __future__ import annotations

import typer

from medarc_rl.cli import add_command_without_config, new_group
from medarc_rl.environments.checking import CheckOptions, check
from medarc_rl.environments.installing import (
    InstallOptions,
    ListOptions,
    UninstallOptions,
    install,
    list_environments,
    uninstall,
)
from medarc_rl.environments.making import NewOptions, new
from medarc_rl.environments.trying import TryOptions, try_


def add_environment_commands(app: typer.Typer) -> None:
    """Add the group `env` to a program."""
    group = new_group(app, "env", "Make, check, try and install environments.")
    add_command_without_config(group, "new", NewOptions, new)
    add_command_without_config(group, "check", CheckOptions, check)
    add_command_without_config(group, "try", TryOptions, try_)
    add_command_without_config(group, "install", InstallOptions, install)
    add_command_without_config(group, "list", ListOptions, list_environments)
    add_command_without_config(group, "uninstall", UninstallOptions, uninstall)
