"""Trees of files go to S3 and come back unchanged, whatever the network does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import Fault, Proxy, corrupted, failing, only, reset, truncated

from prime_rl.storage import S3, BadS3Name, S3Name, Tree, download_tree, upload_tree
from prime_rl.utils.errors import StorageError


def name_of(bucket: str, key: str = "") -> S3Name:
    return S3Name(bucket, key)


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with an empty, a small and a larger file, a marker, and names that need quoting."""
    root = tmp_path / "tree"
    (root / "inner folder").mkdir(parents=True)
    (root / "empty.txt").touch()
    (root / "config.json").write_text("{}")
    (root / "inner folder" / "größe +&.bin").write_bytes(os.urandom(300_000))
    (root / "STABLE").write_text("done")
    return root


def test_a_tree_comes_back_as_it_was(s3: S3, proxy: Proxy, bucket: str, tree: Path, tmp_path: Path) -> None:
    name = name_of(bucket, "models/tiny")
    assert upload_tree(s3, tree, name) == Tree(4, 300_006)
    puts = [path for method, path in proxy.seen if method == "PUT" and "/models/" in path]
    assert "STABLE" in puts[-1], "the marker comes last"
    s3.write(b"another model", name_of(bucket, "models/tiny-2/config.json"))
    s3.client.put_object(Bucket=bucket, Key="models/tiny/folder/", Body=b"")
    assert download_tree(s3, name, tmp_path / "back") == Tree(4, 300_006)
    assert files_of(tmp_path / "back") == files_of(tree)


def test_one_object_is_a_tree_of_one_file(s3: S3, bucket: str, tmp_path: Path) -> None:
    s3.write(b"rows", name_of(bucket, "data/rows.jsonl"))
    s3.write(b"others", name_of(bucket, "data/rows.jsonl.old"))
    download_tree(s3, name_of(bucket, "data/rows.jsonl"), tmp_path)
    assert files_of(tmp_path) == {"rows.jsonl": b"rows"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(only("GET", "inner", failing(500, "InternalError")), id="500"),
        pytest.param(only("GET", "inner", failing(503, "SlowDown")), id="503"),
        pytest.param(only("GET", "inner", reset), id="reset"),
        pytest.param(only("GET", "inner", truncated(100_000)), id="truncated"),
        pytest.param(only("GET", "inner", truncated(0)), id="empty body"),
        pytest.param(only("GET", "inner", corrupted), id="corrupted"),
        pytest.param(only("GET", "list-type", truncated(50)), id="truncated listing"),
        pytest.param(only("GET", "list-type", failing(503, "SlowDown")), id="listing slowed down"),
    ],
)
def test_a_disturbed_download_is_repeated(
    s3: S3, proxy: Proxy, bucket: str, tree: Path, tmp_path: Path, fault: Fault
) -> None:
    upload_tree(s3, tree, name_of(bucket, "tree"))
    proxy.disturb(fault)
    download_tree(s3, name_of(bucket, "tree"), tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree)
    assert [times for _, times in proxy.faults] == [0]


@pytest.mark.parametrize(("part_bytes", "parts"), [(6 << 20, 2), (5 << 20, 3)])
def test_objects_in_parts_are_compared_by_their_etag(
    s3: S3, proxy: Proxy, bucket: str, tmp_path: Path, part_bytes: int, parts: int
) -> None:
    s3 = S3(s3.client, part_bytes)
    (tmp_path / "weights.bin").write_bytes(os.urandom(11 << 20))
    s3.upload(tmp_path / "weights.bin", name_of(bucket, "w/weights.bin"))
    (item,) = s3.find(name_of(bucket, "w"))
    assert item.etag.endswith(f"-{parts}")
    proxy.disturb(only("GET", "weights.bin", corrupted))
    download_tree(s3, name_of(bucket, "w"), tmp_path / "back")
    assert (tmp_path / "back" / "weights.bin").read_bytes() == (tmp_path / "weights.bin").read_bytes()
    assert len([1 for method, path in proxy.seen if method == "GET" and "weights.bin" in path]) == 2 * parts


def test_a_download_that_stays_damaged_is_refused(
    s3: S3, proxy: Proxy, bucket: str, tree: Path, tmp_path: Path
) -> None:
    upload_tree(s3, tree, name_of(bucket, "tree"))
    proxy.disturb(only("GET", "inner", corrupted), times=100)
    with pytest.raises(StorageError, match="do not have its ETag"):
        download_tree(s3, name_of(bucket, "tree"), tmp_path / "back")
    assert not list((tmp_path / "back" / "inner folder").iterdir())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(only("PUT", "inner", failing(500, "InternalError")), id="500"),
        pytest.param(only("PUT", "inner", failing(503, "SlowDown")), id="503"),
        pytest.param(only("PUT", "inner", reset), id="reset"),
    ],
)
def test_a_disturbed_upload_is_repeated(s3: S3, proxy: Proxy, bucket: str, tree: Path, fault: Fault) -> None:
    proxy.disturb(fault)
    upload_tree(s3, tree, name_of(bucket, "tree"))
    assert {each.name.key[5:]: each.size_bytes for each in s3.find(name_of(bucket, "tree"))} == {
        path: len(data) for path, data in files_of(tree).items()
    }


def test_an_interrupted_download_keeps_whole_files_and_continues(
    s3: S3, proxy: Proxy, bucket: str, tree: Path, tmp_path: Path
) -> None:
    upload_tree(s3, tree, name_of(bucket, "tree"))
    proxy.disturb(only("GET", "inner", failing(403, "AccessDenied")))
    with pytest.raises(StorageError, match=r"lack the right s3:GetObject$"):
        download_tree(s3, name_of(bucket, "tree"), tmp_path / "back")
    whole = {path for path in files_of(tmp_path / "back") if not path.endswith(".tmp")}
    assert "inner folder/größe +&.bin" not in whole
    proxy.calm()
    download_tree(s3, name_of(bucket, "tree"), tmp_path / "back", keep=True)
    assert files_of(tmp_path / "back") == files_of(tree)
    fetched = [path for method, path in proxy.seen if method == "GET" and "list-type" not in path]
    assert len(fetched) == 3 - len(whole - {"empty.txt"})


def nothing(s3: S3, bucket: str) -> None:
    s3.find(S3Name(bucket, "models/none"))


def no_bucket(s3: S3, bucket: str) -> None:
    s3.find(S3Name("no-such-bucket-here", "models"))


def climbing_key(s3: S3, bucket: str) -> None:
    s3.write(b"", S3Name(bucket, "evil/../../etc/passwd"))
    s3.find(S3Name(bucket, "evil"))


def file_and_folder(s3: S3, bucket: str) -> None:
    s3.write(b"", S3Name(bucket, "m/a"))
    s3.write(b"", S3Name(bucket, "m/a/b"))
    download_tree(s3, S3Name(bucket, "m"), Path("/nonexistent"))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (nothing, "models/none: there is no object and no prefix with this name"),
        (no_bucket, "s3://no-such-bucket-here/models: there is no such bucket"),
        (climbing_key, "which cannot be a file: parts of a key must not be empty"),
        (file_and_folder, "holds both an object 'a' and objects below it"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    s3: S3, bucket: str, ask: Callable[[S3, str], None], words: str
) -> None:
    with pytest.raises(StorageError) as raised:
        ask(s3, bucket)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_credentials_and_a_dead_endpoint_are_said_in_one_line(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"^s3://some-bucket/x: no AWS credentials are found: set AWS_PROFILE"):
        S3.connect().find(S3Name("some-bucket", "x"))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match=r"^s3: The config profile \(nobody\) could not be found"):
        S3.connect()
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises(StorageError, match=r"^s3: Invalid endpoint: not a url"):
        S3.connect()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://", "a bucket's name has"),
        ("s3:///key", "a bucket's name has"),
        ("s3://a", "a bucket's name has"),
        ("s3://bucket//key", "parts of a key"),
        ("s3://bucket/../key", "parts of a key"),
        ("s3://bucket/\x1b[2J", "control characters"),
        (f"s3://bucket/{'k' * 1025}", "at most 1024 bytes"),
    ],
)
def test_a_name_that_s3_cannot_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadS3Name, match=words) as raised:
        S3Name.of(text)
    assert str(raised.value).isprintable()


def test_names_survive_a_path() -> None:
    assert S3Name.of("s3://bucket/a/b/") == S3Name.of(Path("s3://bucket/a/b")) == S3Name("bucket", "a/b")
    assert S3Name.of("s3://bucket") == S3Name("bucket", "")
    assert S3Name.of("outputs/s3") is S3Name.of("org/model") is S3Name.of("/s3:/x") is None
