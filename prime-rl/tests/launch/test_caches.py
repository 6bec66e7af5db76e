"""Where launches keep compiled code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_rl.interpreters import venvs_root
from prime_rl.launch.caches import bytecode_env, cache_env, compile_caches, made_for
from prime_rl.utils.errors import NotPrivate


@pytest.mark.parametrize(
    ("variables", "is_compiled", "kept"),
    [
        ({"XDG_CACHE_HOME": "{}/caches"}, False, "{}/caches/prime-rl/bytecode"),
        ({"PRIME_RL_CACHE": "{}/fast"}, False, "{}/fast/bytecode"),
        ({"PYTHONPYCACHEPREFIX": "{}/elsewhere"}, False, "{}"),
        ({}, True, None),
        ({"PYTHONDONTWRITEBYTECODE": ""}, False, None),
    ],
)
def test_children_keep_bytecode_only_where_it_is_missing_and_forbidden(
    tmp_path: Path, variables: dict[str, str], is_compiled: bool, kept: str | None
) -> None:
    named = {name: value.format(tmp_path) for name, value in variables.items()}
    changed = bytecode_env({"PYTHONDONTWRITEBYTECODE": "1"} | named, is_compiled)
    assert bool(changed) == (kept is not None)
    if kept is not None:
        assert Path(changed["PYTHONPYCACHEPREFIX"]).parent == Path(kept.format(tmp_path))


def test_bytecode_of_the_least_recently_used_environments_goes(tmp_path: Path) -> None:
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PRIME_RL_CACHE": str(tmp_path)}
    for age_s in range(10, 70, 10):
        other = tmp_path / "bytecode" / f"{age_s}s"
        (other / "opt").mkdir(parents=True)
        os.utime(other, (time.time() - age_s,) * 2)
    own = Path(bytecode_env(env, is_compiled=False)["PYTHONPYCACHEPREFIX"])
    assert {path.name for path in own.parent.iterdir()} == {own.name, "10s", "20s", "30s"}
    assert bytecode_env(env, is_compiled=False)["PYTHONPYCACHEPREFIX"] == str(own)


def test_python_keeps_bytecode_under_that_environment_and_not_next_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "heavy.py").write_text("")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")}
    env.pop("PYTHONPYCACHEPREFIX", None)
    child = {**env, **bytecode_env(env, is_compiled=False), "PYTHONPATH": str(tmp_path / "source")}
    subprocess.run([sys.executable, "-c", "import heavy"], env=child, check=True)
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["heavy.py"]
    assert len(list((tmp_path / "caches").rglob("heavy.*.pyc"))) == 1


def use(root: Path, combination: str, size_bytes: int = 0, limit_bytes: int = 10_000) -> Path:
    """A launch that leaves a file of this size in its cache."""
    with compile_caches({"PRIME_RL_CACHE": str(root)}, combination, root / "unused", limit_bytes) as directory:
        if size_bytes:
            (directory / "kernel.bin").write_bytes(bytes(size_bytes))
    return directory


def age(directory: Path, seconds: float) -> None:
    os.utime(directory / "in_use.lock", (time.time() - seconds,) * 2)


def test_launches_of_the_same_versions_and_hardware_share_a_cache(tmp_path: Path) -> None:
    first = use(tmp_path, made_for(["H200"], {}), 10)
    assert use(tmp_path, made_for(["H200", "H200"], {})) == first
    assert (first / "kernel.bin").exists()
    others = [made_for(["A100"], {}), made_for([], {}), made_for(["H200"], {"PRIME_RL_VLLM_PYTHON": "/other/python"})]
    assert len({first, *(use(tmp_path, combination) for combination in others)}) == 4
    assert {path.stat().st_mode & 0o777 for path in (tmp_path, first)} == {0o700}


def test_the_least_recently_used_go_beyond_the_limit(tmp_path: Path) -> None:
    a, b = (use(tmp_path, name, 6_000, limit_bytes=100_000) for name in "ab")
    age(a, 10)
    age(b, 20)
    use(tmp_path, "c", 3_000)
    assert (a.exists(), b.exists()) == (True, False)
    assert use(tmp_path, "a", 20_000) == a
    use(tmp_path, "c")
    assert not a.exists(), "it was larger than the limit by itself"


def test_what_another_launch_uses_stays_however_large(tmp_path: Path) -> None:
    with compile_caches({"PRIME_RL_CACHE": str(tmp_path)}, "a", tmp_path / "unused", 10_000) as directory:
        (directory / "kernel.bin").write_bytes(bytes(100_000))
        age(directory, 10)
        use(tmp_path, "b")
        assert use(tmp_path, "a") == directory
        assert (directory / "kernel.bin").exists()
    use(tmp_path, "b")
    assert not directory.exists()


def test_many_launches_at_once_find_the_cache_whole(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from prime_rl.launch.caches import compile_caches\n"
        "for attempt in range(30):\n"
        "    with compile_caches({'PRIME_RL_CACHE': sys.argv[1]}, sys.argv[2], Path('x'), 10) as directory:\n"
        "        file = directory / f'{sys.argv[3]}.bin'\n"
        "        file.write_bytes(bytes(20))\n"
        "        assert len(file.read_bytes()) == 20\n"
    )
    words = [(combination, str(number)) for combination in "ab" for number in range(2)]
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *each]) for each in words]
    assert [process.wait() for process in processes] == [0] * 4


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(NotPrivate, match="set PRIME_RL_CACHE to another path"):
        use(tmp_path, "a")


def test_a_cache_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    use(tmp_path, "a")
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_without_a_home_directory_a_launch_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "mkdir", read_only)
    with compile_caches({"XDG_CACHE_HOME": str(tmp_path)}, "a", Path("own")) as directory:
        assert directory == Path("own")
    with pytest.raises(PermissionError):
        use(tmp_path, "a")


def test_children_compile_into_the_cache_unless_the_user_names_another(tmp_path: Path) -> None:
    env = cache_env(tmp_path, "trainer", {"VLLM_CACHE_ROOT": "/named", "XDG_CACHE_HOME": "/home/caches"})
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "trainer" / "inductor")
    assert "VLLM_CACHE_ROOT" not in env
    assert env["HF_HOME"] == "/home/caches/huggingface"
    assert env["UV_CACHE_DIR"] == "/home/caches/uv"
    # A process of the launch finds the interpreters that the launcher's checks have made.
    assert venvs_root(env) == Path("/home/caches/prime-rl/venvs")


@pytest.mark.parametrize("caches", ["/dev/null/caches", "/proc/caches", "{}/left"])
def test_a_home_that_cannot_be_written_costs_a_launch_its_cache_and_no_more(tmp_path: Path, caches: str) -> None:
    """Some clusters mount home directories read-only on their nodes; others are full, or over their quota."""
    root = Path(caches.format(tmp_path)) / "prime-rl"
    if caches == "{}/left":  # it was made where the home can be written, and cannot be used any more
        (root / "compiled" / ".lock").mkdir(parents=True)
    with compile_caches({"XDG_CACHE_HOME": str(root.parent)}, "any", tmp_path / "scratch") as directory:
        assert directory == tmp_path / "scratch"
    with (
        pytest.raises(OSError, match=re.escape(str(root.parent))),
        compile_caches({"PRIME_RL_CACHE": str(root)}, "any", tmp_path / "scratch"),
    ):
        pass
