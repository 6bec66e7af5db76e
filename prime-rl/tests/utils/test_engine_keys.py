"""Where clients find the key of a server, and what must not hold keys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.utils.engine_keys import client_key, direct_loopback, key_file, published_key
from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.private import private_directory, runtime_directory
from prime_rl.utils.scratch import locked_file


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(tmp_path / "private"))


def test_a_variable_comes_before_a_file() -> None:
    with published_key(8123, "from file"):
        assert client_key("http://localhost:8123/v1", "KEY", {"KEY": "named"}) == "named"
        assert client_key("http://localhost:8123/v1", "KEY", {"KEY": "named\n"}) == "named"
        assert client_key("http://localhost:8123/v1", "KEY", {"KEY": "EMPTY"}) == "from file"
        assert client_key("http://127.0.0.1:8123/v1", "KEY", {}) == "from file"


@pytest.mark.parametrize("url", ["http://node7:8123/v1", "https://api.example.org/v1", "http://10.0.0.1:8123/v1"])
def test_a_key_of_this_machine_is_never_sent_to_another_one(url: str) -> None:
    with published_key(8123, "key"):
        assert client_key(url, "KEY", {}) is None


def test_a_key_ends_with_its_server() -> None:
    with published_key(8123, "key") as file:
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()
    assert client_key("http://localhost:8123/v1", "KEY", {}) is None


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)

    with pytest.raises(NotPrivate, match="can be entered by other users: run `chmod 700"):
        private_directory(tmp_path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    with pytest.raises(NotPrivate, match="is not a directory"):
        private_directory(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)

    with pytest.raises(NotPrivate, match="belongs to user 65534"):
        private_directory(theirs)
    sft = "max_steps = 1\n[model]\nname = 'a'\n[data]\nname = 'fake'\nseq_len = 128\n"
    (tmp_path / "sft.toml").write_text(sft)
    words = [sys.executable, "-m", "prime_rl.entrypoints.sft", "@", "sft.toml", "--output_dir", "out"]
    env = os.environ | {"PRIME_RL_RUNTIME_DIR": str(theirs)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(f"error: {theirs} belongs to user 65534")) == (
        2,
        True,
    )


def test_a_link_in_place_of_a_key_file_is_not_followed(tmp_path: Path) -> None:
    bystander = tmp_path / "bystander"
    bystander.write_text("unchanged")
    (tmp_path / "key").symlink_to(bystander)

    os.close(locked_file(tmp_path / "key", "secret"))

    assert bystander.read_text() == "unchanged"
    assert (tmp_path / "key").read_text() == "secret"


def test_keys_are_kept_below_the_runtime_directory(tmp_path: Path) -> None:
    assert key_file(1) == runtime_directory() / "engine-1.key"
    assert runtime_directory() == tmp_path / "private"


def test_the_runtime_directory_does_not_end_with_the_login_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_RL_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")

    assert runtime_directory() == Path(f"/tmp/prime-rl-{os.getuid()}")


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.org, 127.0.0.1"}, "a.org,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.org", "no_proxy": "b.org"}, "b.org,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, None),
    ],
)
def test_a_proxy_is_never_asked_for_this_machine(env: dict[str, str], hosts: str | None) -> None:
    assert direct_loopback(env) == ({} if hosts is None else {"NO_PROXY": hosts, "no_proxy": hosts})
