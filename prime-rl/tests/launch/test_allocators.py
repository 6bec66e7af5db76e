"""Memory allocators: which one a process gets. The tests with tcmalloc use the system's."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from prime_rl.launch.caches import cpu_allocator_env, cuda_allocator_env, installed_tcmalloc, library_directories

BLOCK_OF_2_GIB = """
import ctypes
malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
assert malloc(2 * 2**30)  # never written to, so it takes no memory
print(open("/proc/self/maps").read())
"""


@pytest.fixture
def tcmalloc() -> str:
    library = installed_tcmalloc()
    if library is None:
        pytest.skip("tcmalloc is not installed (Debian and Ubuntu: libtcmalloc-minimal4)")
    return library


def test_a_process_loads_the_installed_tcmalloc_which_writes_nothing_about_large_blocks(tcmalloc: str) -> None:
    env = {**os.environ, **cpu_allocator_env(tcmalloc, {})}
    done = subprocess.run([sys.executable, "-c", BLOCK_OF_2_GIB], env=env, capture_output=True, text=True, check=True)
    assert os.path.realpath(tcmalloc) in done.stdout
    assert done.stderr == ""


def test_a_library_in_the_python_environment_goes_before_the_systems(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    library = tmp_path / "lib" / "libtcmalloc.so.4"
    library.touch()
    program = "from prime_rl.launch.caches import installed_tcmalloc; print(installed_tcmalloc())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [str(tmp_path / "bin" / "python"), "-c", program]
    assert subprocess.check_output(argv, env=env, text=True).strip() == str(library)


def test_a_system_python_does_not_search_libraries_of_other_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, prefix, "/usr")
    assert Path("/usr/lib") not in set(library_directories())


def test_a_damaged_library_is_ignored_and_the_process_says_so(tmp_path: Path) -> None:
    (tmp_path / "libtcmalloc.so.4").write_bytes(b"\x7fELF")
    env = {**os.environ, **cpu_allocator_env(installed_tcmalloc([tmp_path]), {})}
    argv = [sys.executable, "-c", "print('runs')"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "runs\n"
    assert "cannot be preloaded" in done.stderr


@pytest.mark.parametrize("name", ["my project", "a:b"])
def test_a_path_that_ld_preload_would_split_is_left_out(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "libtcmalloc.so.4").touch()
    assert installed_tcmalloc([folder]) is None


@pytest.mark.parametrize("given", ["", "/opt/xalt.so"], ids=["switched off", "another library"])
def test_what_the_user_preloads_stays(given: str) -> None:
    assert cpu_allocator_env("/lib/tcmalloc.so", {"LD_PRELOAD": given}) == {}


def test_a_report_threshold_of_the_user_stays() -> None:
    given = {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "1000"}
    assert cpu_allocator_env("/lib/tcmalloc.so", given) == {"LD_PRELOAD": "/lib/tcmalloc.so"}


def test_without_tcmalloc_the_environment_stays() -> None:
    assert cpu_allocator_env(None, {}) == {}


def test_a_configuration_of_the_cuda_allocator_stays() -> None:
    assert cuda_allocator_env({}) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert cuda_allocator_env({"PYTORCH_ALLOC_CONF": "backend:native"}) == {}
    assert cuda_allocator_env({"PYTORCH_CUDA_ALLOC_CONF": ""}) == {}
