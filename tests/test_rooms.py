"""The house reads by its folder names: small rooms, and one name for one thing within a room's tree."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "medarc_rl", ROOT / "prime-rl" / "src" / "prime_rl")
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py") if path.name != "__init__.py")
MOST_MODULES = 15

ALIASES = {"orchestrator/advantage.py", "utils/paths.py", "utils/process.py", "utils/monitor.py"}
"""Old paths of public modules: each only re-exports its new home."""

SIBLINGS = ("trainer/rl", "trainer/sft")
"""Two trainers with the same outline. `trainer.rl.train` and `trainer.sft.train` are public names."""


def room_of(module: Path) -> str:
    """The room whose tree a module belongs to: the package's folder, and each sibling trainer by itself."""
    package = next(package for package in PACKAGES if module.is_relative_to(package))
    relative = module.relative_to(package)
    sibling = next((room for room in SIBLINGS if relative.as_posix().startswith(f"{room}/")), None)
    return f"{package.name}/{sibling or relative.parts[0]}"


def test_no_room_is_crowded() -> None:
    modules = defaultdict(list)
    for path in MODULES:
        modules[str(path.parent.relative_to(ROOT))].append(path.name)
    assert {room: len(names) for room, names in modules.items() if len(names) > MOST_MODULES} == {}


def test_a_module_name_stands_once_in_a_rooms_tree() -> None:
    homes = defaultdict(list)
    for path in MODULES:
        if not any(path.as_posix().endswith(f"prime_rl/{alias}") for alias in ALIASES):
            homes[room_of(path), path.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_aliases_are_one_line() -> None:
    for alias in ALIASES:
        lines = (PACKAGES[1] / alias).read_text(encoding="utf-8").splitlines()
        code = [line for line in lines if line and not line.startswith('"""')]
        assert len(code) == 1, alias
        assert code[0].startswith("from prime_rl."), alias
