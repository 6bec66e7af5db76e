"""`python …/inside SOCKET_FD`: serve one environment or agent to the orchestrator that started this process."""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "prime_rl_worker"


def load_package(name: str, folder: Path) -> None:
    """Import a directory as a package, without its parents and its neighbours: the interpreter has packages of its own,
    and ours are not installed there."""
    # Python puts the program's directory first, where its modules would hide others of the same names.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    if "--agent" in sys.argv and sys.version_info >= (3, 11):
        # An agent uses more of our code than this directory, which still needs nothing but the standard library.
        load_package("prime_rl", HERE.parents[2])
        importlib.import_module("prime_rl.orchestrator.workers.inside.serving").main()
    else:
        load_package(NAME, HERE)
        importlib.import_module(f"{NAME}.serving").main()
