"""`python …/inside SOCKET_FD`: serve one environment to the orchestrator that started this process."""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "prime_rl_guest"


def _load_package() -> None:
    """Import this directory as a package, without its parents: they are not installed here."""
    # Python puts the directory first, where its modules would hide others of the same names.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = importlib.util.spec_from_file_location(NAME, HERE / "__init__.py", submodule_search_locations=[str(HERE)])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load_package()
    importlib.import_module(f"{NAME}.serving").main()
