"""The kit for a machine with a GPU: its pack installs without a network, and its scripts run on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "benchmarks" / "gpu"
OURS = {"medarc-rl", "prime-rl", "reverse-text", "med-calc"}
PACKED = {"pydantic", "pydantic-core", "msgspec", "tomli-w"}
"""Some of our dependencies that the machine of these tests lacks."""


def offline(*command: str) -> list[str]:
    """The command without a network but a loopback interface."""
    return ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "--", *command]


def needs_offline() -> None:
    for program in ("uv", "ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if subprocess.run(offline("true"), capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: the pack holds the committed source")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with this environment's packages, except ours and those to be packed."""
    needs_offline()
    home = tmp_path_factory.mktemp("machine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    site = next((home / "venv" / "lib").glob("python*/site-packages"))
    absent = OURS | PACKED
    present = {}
    for found in distributions():
        name = found.metadata["Name"].lower().replace("_", "-")
        if name not in absent and found.files is not None:
            present[name] = found
    for found in present.values():
        # Whole top-level entries: a package and its metadata.
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source, target = Path(str(found.locate_file(top))), site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)
    (home / "machine.txt").write_text("\n".join(sorted(present)) + "\n")
    return home


@pytest.fixture(scope="module")
def pack(machine: Path) -> Path:
    out = machine / "pack"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = ["--out", str(out), "--machine", str(machine / "machine.txt"), "--python", version]
    done = subprocess.run(["bash", str(KIT / "pack"), *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_pack_holds_our_packages_and_what_the_machine_lacks(pack: Path) -> None:
    names = {wheel.name.split("-")[0].replace("_", "-").lower() for wheel in (pack / "wheels").glob("*.whl")}
    assert {"medarc-rl", "prime-rl", "reverse-text", "trl", *PACKED} <= names
    assert not {"torch", "transformers", "numpy", "wandb"} & names
    with tarfile.open(pack / "source.tar.gz") as source:
        assert {"benchmarks/gpu/kit.py", "benchmarks/trainer_step.py"} <= set(source.getnames())


@pytest.mark.slow
def test_without_a_network_the_pack_installs_and_its_parts_run_on_a_cpu(pack: Path, machine: Path) -> None:
    out = machine / "results"
    options = ["--device", "cpu", "--tiny", "--out", str(out), "--minutes", "60"]
    done = subprocess.run(
        offline("bash", str(pack / "run"), *options, "machine", "engine-numbers", "trainer-speed"),
        env=os.environ | {"PYTHON": str(machine / "venv" / "bin" / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert {part["part"]: part["status"] for part in results["parts"]} == {
        "machine": "ok",
        "engine-numbers": "ok",
        "trainer-speed": "ok",
    }
    assert results["commit"] == (pack / "commit").read_text().strip()
    # The engine that ran is the pack's, not this environment's.
    imported = next(check for check in results["parts"][0]["checks"] if check["name"] == "every room imports")
    assert imported["detail"].startswith(str(pack / "home"))
    rows = [row["case"] for row in results["parts"][2]["rows"]]
    assert rows == ["sft tiny 128", "rl tiny 128 ac", "rl tiny 128 lora", "plain tiny 128", "trl tiny 128"]


def run_pack(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(KIT / "pack"), *options], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--pyton", "3.12"], "error: unknown option --pyton"),
        (["--out"], "error: --out needs a value"),
        (["--machine", "/no/such/file"], "error: --machine /no/such/file: no such file"),
        (["--python", "3.10"], "error: --python 3.10: 3.11, 3.12 or 3.13"),
        (["--limit-mib", "64M"], "error: --limit-mib 64M: a whole number of MiB"),
    ],
)
def test_a_wrong_option_of_pack_is_one_line(options: list[str], line: str) -> None:
    done = run_pack(*options)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1


VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
WHOLE = {
    "commit": "abc",
    "python": VERSION,
    "source.tar.gz": "x",
    "wheels/prime_rl-1-py3-none-any.whl": "x",
    "wheels/medarc_rl-1-py3-none-any.whl": "x",
    "pip/pip-1-py3-none-any.whl": "x",
}
PARTIAL = {name: "the pack in {pack} lacks " + name.replace("-1-py3-none-any", "-*") for name in WHOLE}


def run_of(pack: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python}
    return subprocess.run(["bash", str(pack / "run")], env=environment, capture_output=True, text=True)


def pack_of(directory: Path, files: dict[str, str]) -> Path:
    (directory / "wheels").mkdir()
    (directory / "pip").mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    shutil.copy(KIT / "run", directory / "run")
    return directory


@pytest.mark.parametrize("lost", PARTIAL)
def test_a_pack_that_was_copied_in_part_is_one_line(lost: str, tmp_path: Path) -> None:
    pack = pack_of(tmp_path, {name: text for name, text in WHOLE.items() if name != lost})
    done = run_of(pack, sys.executable)
    assert (done.returncode, done.stderr) == (2, f"error: {PARTIAL[lost].format(pack=pack)}: copy it again\n")


@pytest.mark.parametrize(
    ("packed_for", "python", "line"),
    [
        (VERSION, "no-such-python", "PYTHON=no-such-python: no such program"),
        (VERSION, "false", "PYTHON=false is no Python"),
        ("3.99", sys.executable, f"is Python {VERSION}, and the pack is for 3.99"),
        (VERSION, "{bare}", "bin/python has no torch: set PYTHON to the interpreter that has it"),
    ],
)
def test_an_interpreter_that_cannot_run_the_kit_is_one_line(
    packed_for: str, python: str, line: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    pack = pack_of(tmp_path, WHOLE | {"python": packed_for})
    done = run_of(pack, python.format(bare=bare / "bin" / "python"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert line in done.stderr
    assert not (pack / "home").exists()


def test_without_a_pack_the_kit_says_how_to_make_one(tmp_path: Path) -> None:
    alone = tmp_path / "benchmarks" / "gpu"
    alone.mkdir(parents=True)
    shutil.copy(KIT / "run", alone / "run")
    done = run_of(alone, sys.executable)
    assert done.returncode == 2
    assert "run bash benchmarks/gpu/pack first" in done.stderr


def test_a_part_that_fails_or_is_unknown_is_told(tmp_path: Path) -> None:
    command = [sys.executable, str(KIT / "kit.py"), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    unknown = subprocess.run([*command, "trainer-sped"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "there is no part 'trainer-sped'" in unknown.stderr
    cut_off = subprocess.run([*command, "--minutes", "0.001", "machine"], cwd=ROOT, capture_output=True, text=True)
    assert cut_off.returncode == 1
    assert json.loads((tmp_path / "results.json").read_text())["parts"][0]["status"].startswith("cut off after")


def test_with_too_little_time_each_part_gets_its_share_and_what_is_left_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(KIT))
    kit = importlib.import_module("kit")
    first, second = kit.Part("first", "", 9), kit.Part("second", "", 3)
    assert kit.share_s([first, second], left_s=6 * 60) == 4.5 * 60
    assert kit.share_s([second], left_s=4 * 60) == 3 * 60
    assert kit.share_s([second], left_s=2 * 60) == 2 * 60


LAUNCHER = """
import signal, subprocess, sys
run = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
def end(signum, frame):
    run.kill()
    sys.exit(run.wait())
signal.signal(signal.SIGTERM, end)
print(run.pid, flush=True)
signal.pause()
"""
"""Like ours, it ends its run, which has a session of its own, when it is told to end."""


def test_a_part_that_is_cut_off_leaves_no_process_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KIT))
    kit = importlib.import_module("kit")
    part = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, start_new_session=True)
    assert part.stdout is not None
    with part, part.stdout as said:
        run = int(said.readline())
        kit.end_group(part)
    assert not Path(f"/proc/{run}").exists()


def test_a_kit_that_is_told_to_end_takes_its_part_with_it(tmp_path: Path) -> None:
    command = [sys.executable, str(KIT / "kit.py"), "--device", "cpu", "--out", str(tmp_path), "machine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as kit:
        assert kit.stdout is not None
        while not parts_with(tmp_path, kit.pid):
            assert kit.poll() is None
        kit.terminate()
        assert b"Traceback" not in kit.communicate()[1]
    assert kit.returncode == 128 + signal.SIGTERM
    assert not parts_with(tmp_path, kit.pid)


def parts_with(out: Path, kit: int) -> list[bytes]:
    """Command lines of other processes that name the folder of results."""
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name != str(kit)]
    return [command for command in commands if str(out).encode() in command]


def test_the_corner_of_versions_deletes_no_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = subprocess.run(["bash", str(ROOT / ".ci" / "test-corner"), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert (tmp_path / "thesis.txt").read_text() == "mine"
