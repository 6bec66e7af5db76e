"""`python …/boot.py SOCKET_FD`: runs an agent, in an interpreter in which our packages need not be installed.

Our code is imported from this tree, and needs nothing but Python 3.11. An agent that takes a client needs `openai`.
"""

import importlib
import importlib.util
import socket
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLDEST = (3, 11)


def _load_package() -> None:
    """Import the package that this file is in, without the packages next to it: the interpreter has its own."""
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
    name = ROOT.name
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


def _refuse() -> None:
    """Read the greeting, and answer that this Python is too old."""
    frames = importlib.import_module(f"{ROOT.name}.orchestrator.guests.inside.frames")
    version, oldest = sys.version.split()[0], ".".join(map(str, OLDEST))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        frames.receive_now(connection)
        connection.sendall(frames.encode({"fault": f"an agent needs Python {oldest} or later; this is {version}"}))


if __name__ == "__main__":
    _load_package()
    if sys.version_info < OLDEST:
        _refuse()
    else:
        importlib.import_module(f"{ROOT.name}.orchestrator.agents.host").main()
