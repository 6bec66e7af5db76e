"""The commands of `medarc_train env`, each importing what it runs when it runs."""

from __future__ import annotations

from medarc_rl.environments.options import (
    CheckOptions,
    InstallOptions,
    ListOptions,
    NewOptions,
    TryOptions,
    UninstallOptions,
)


def new(options: NewOptions) -> int:
    """Write the package of a new environment: `env new medqa --kind tools`. It trains as it is; replace its rows."""
    from medarc_rl.environments.making import new as run

    return run(options)


def check(options: CheckOptions) -> int:
    """Look at an environment's dataset, and try its rewards on scripted answers: `env check medqa`. Needs no model.

    Ends with 1 if something failed.
    """
    from medarc_rl.environments.checking import check as run

    return run(options)


def try_(options: TryOptions) -> int:
    """Roll out a few examples, and show what was said and what it earned: `env try medqa --model MODEL`.

    Evaluation rows are used, or training rows if there are none.
    """
    from medarc_rl.environments.trying import try_ as run

    return run(options)


def install(options: InstallOptions) -> int:
    """Install an environment for this user's runs: `env install ./medqa`. Its id then works in every config.

    If the run's interpreter has what it requires, it runs there; otherwise it gets an interpreter of its own.
    """
    from medarc_rl.environments.installing import install as run

    return run(options)


def list_environments(options: ListOptions) -> int:
    """List the environments that runs find by id: installed ones, and those of the run's own interpreter."""
    from medarc_rl.environments.installing import list_environments as run

    return run(options)


def uninstall(options: UninstallOptions) -> int:
    """Remove an environment that `env install` has installed."""
    from medarc_rl.environments.installing import uninstall as run

    return run(options)
