"""Which files of a project are sent: git's own rules, and never a secret."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("pathspec", reason="pathspec is not installed: `uv sync --inexact --extra sagemaker`")

from medarc_rl.backends.sagemaker.source_files import pack, packed, relocated, stage, unpack
from medarc_rl.errors import MedarcError, UsageError

LIMIT_BYTES = 10_000


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(root: Path, *include: str) -> set[str]:
    return set(stage(root, include, LIMIT_BYTES).files)


PATTERNS = ("*.txt", "!a.txt", "/b", "b/", "c/*.md", "**/d", "a*", "!b/a.txt", "c", "!c/", "#x", "b/**/d", "\\!x")
FILES = [f"{folder}{name}" for folder in ("", "b/", "c/", "b/c/", "c/b/") for name in ("a.txt", "a.md", "d", "x")]


@given(root=st.lists(st.sampled_from(PATTERNS), max_size=4), inner=st.lists(st.sampled_from(PATTERNS), max_size=3))
@example(root=["*.txt"], inner=["!c/"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_ignore_files_are_read_as_git_reads_them(
    tmp_path_factory: pytest.TempPathFactory, root: list[str], inner: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("project")
    write(directory, dict.fromkeys(FILES, "x"))
    write(directory, {".gitignore": "\n".join(root) + "\n", "b/.gitignore": "\n".join(inner) + "\n"})
    subprocess.run(["git", "init", "-q", str(directory)], check=True)
    listed = ["git", "-C", str(directory), "ls-files", "--others", "--exclude-standard", "-z"]
    of_git = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    assert names(directory) == {name for name in of_git if name}


def test_our_own_ignore_file_wins_and_include_wins_over_both(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "data/\n*.md\n", ".medarcignore": "!data/\nbig/\n"})
    write(tmp_path, {"data/rows.jsonl": "", "notes.md": "", "big/a/x.bin": "", "big/y.bin": "", "run.py": ""})
    ours = {".gitignore", ".medarcignore", "data/rows.jsonl", "run.py"}
    assert names(tmp_path) == ours
    assert names(tmp_path, "big/a", "notes.md") == ours | {"big/a/x.bin", "notes.md"}


def test_secrets_runs_caches_and_environments_are_never_sent(tmp_path: Path) -> None:
    secrets = [".env", ".env.local", "prod.env", "a/.netrc", "a/key.pem", "id_rsa", ".aws/credentials", "a/.ssh/config"]
    runs = ["outputs/rt/metrics.jsonl", "outputs/rt/samples/x"]
    others = ["__pycache__/x.pyc", ".git/config", "venv/pyvenv.cfg", "venv/lib/x.py", "node_modules/x.js"]
    write(tmp_path, dict.fromkeys([*secrets, *runs, *others, "code.py", ".env.example"], "x"))
    staged = stage(tmp_path, ["a"], LIMIT_BYTES)
    assert set(staged.files) == {"code.py", ".env.example"}
    told = " ".join(staged.left_out)
    assert all(name.split("/")[-1] in told or name.split("/")[-2] in told for name in secrets)
    assert "outputs/rt/: the directory of a run" in staged.left_out


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret.txt": "x"})
    project = write(tmp_path / "project", {"a.txt": "x"})
    (project / "inner.txt").symlink_to("a.txt")
    (project / "outer.txt").symlink_to(outside / "secret.txt")
    (project / "folder").symlink_to(outside)
    (project / "broken").symlink_to("nothing")
    os.mkfifo(project / "pipe")
    staged = stage(project, (), LIMIT_BYTES)
    assert set(staged.files) == {"a.txt", "inner.txt"}
    assert len(staged.left_out) == 4


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, {"data/a.bin": "x" * 9_000, "b.bin": "x" * 2_000})
    with pytest.raises(UsageError, match=r"the largest: data \(0.0 MB\), b.bin.*\.medarcignore"):
        stage(tmp_path, (), LIMIT_BYTES)


def test_an_archive_depends_on_names_contents_and_executable_bits_alone(tmp_path: Path) -> None:
    digests = []
    for copy in ("one", "two"):
        project = write(tmp_path / copy, {"b.py": "b", "a/ünï.txt": "a"})
        os.utime(project / "b.py", (1, len(digests)))
        (project / "b.py").chmod(0o755 if copy == "one" else 0o700)
        with packed(stage(project, (), LIMIT_BYTES), "x = 1\n") as bundle:
            digests.append(bundle.sha256)
            unpack(bundle.path, tmp_path / f"{copy}-out")
        assert not bundle.path.exists()
    assert digests[0] == digests[1]
    assert (tmp_path / "one-out" / "source" / "a" / "ünï.txt").read_text() == "a"
    assert os.access(tmp_path / "one-out" / "source" / "b.py", os.X_OK)


def test_an_archive_writes_only_below_its_target(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as writing:
        entry = tarfile.TarInfo("../evil")
        writing.addfile(entry)
    with pytest.raises(MedarcError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "target")
    assert not (tmp_path / "evil").exists()


def test_a_file_that_shrinks_while_it_is_packed_is_told(tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"a.txt": "abc"})
    staged = stage(project, (), LIMIT_BYTES)
    (project / "a.txt").unlink()
    with pytest.raises(MedarcError, match=r"a\.txt: No such file"):
        pack(tmp_path / "x.tar.gz", staged.files, {})


def test_paths_of_a_config_are_relative_in_the_job_or_refused(tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"rows.jsonl": "", "model/config.json": "", "model/w.safetensors": ""})
    write(project, {".gitignore": "*.safetensors\n", "template.jinja": "", "tuned/x.bin": ""})
    write(tmp_path, {"outside.jsonl": ""})
    table = {
        "data": {"name": str(project / "rows.jsonl")},
        "model": {"name": "model"},
        "teacher": {"name": "Org/Name"},
        "list": [{"path": "./template.jinja"}, {"path": "/opt/ml/input/data/x"}, {"path": "s3://bucket/x"}],
        "far": {"path": str(tmp_path / "outside.jsonl")},
        "kind": "tuned",
        "long": "x/" * 5000,
    }
    moved, faults = relocated(table, project, stage(project, (), LIMIT_BYTES))
    assert moved == {**table, "data": {"name": "rows.jsonl"}}
    assert [fault.partition(":")[0] for fault in faults] == [
        "model.name = model",
        f"far.path = {tmp_path}/outside.jsonl",
    ]
    assert "leaves model/w.safetensors out of the job; add --include model" in faults[0]
    assert relocated({"m": {"name": "model"}}, project, stage(project, ["model"], LIMIT_BYTES))[1] == []
