"""Inputs on S3 become local copies that are whole or absent, made once for all processes."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image
from s3_server import Proxy, failing, only

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.environments.rows.arguments import read_rows_config
from prime_rl.environments.rows.loading import load_problems
from prime_rl.storage import S3, S3Name
from prime_rl.storage.staging import CACHE_VARIABLE, Listing, StoredImages, folder_of, inputs_of, local_copy, staged
from prime_rl.utils.errors import StagingRefused, StorageError
from prime_rl.utils.images import KNOWN_FORMATS, ImageFault, ImageLimits, image_parts, located, read_image

MODEL = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "inner/tokenizer.json": b"[]"}

FETCH = """
import sys
from pathlib import Path
from prime_rl.storage import S3, S3Name
from prime_rl.storage.staging import Listing, local_copy
s3 = S3.connect()
print(local_copy(s3, Listing.of(s3, S3Name.of(sys.argv[1])), Path(sys.argv[2]), lambda line: None))
"""


@pytest.fixture
def model(s3: S3, bucket: str) -> S3Name:
    name = S3Name(bucket, "org/model")
    for path, data in MODEL.items():
        s3.write(data, name.below(path))
    return name


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def copy_of(s3: S3, name: S3Name, root: Path) -> Path:
    return local_copy(s3, Listing.of(s3, name), root, lambda line: None)


def gets(proxy: Proxy) -> list[str]:
    return [path for method, path in proxy.seen if method == "GET" and "list-type" not in path]


def test_a_copy_is_made_once_and_is_private(s3: S3, proxy: Proxy, model: S3Name, root: Path) -> None:
    first = copy_of(s3, model, root)
    assert {path: (first / path).read_bytes() for path in MODEL} == MODEL
    assert first.name == "model"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    seen = len(gets(proxy))
    assert copy_of(s3, model, root) == first
    assert len(gets(proxy)) == seen == len(MODEL)


def test_changed_objects_make_another_copy(s3: S3, model: S3Name, root: Path) -> None:
    first = copy_of(s3, model, root)
    s3.write(b"v" * 5000, model.below("model.safetensors"))
    second = copy_of(s3, model, root)
    assert (first / "model.safetensors").read_bytes() == b"w" * 5000
    assert (second / "model.safetensors").read_bytes() == b"v" * 5000


def test_models_of_one_name_do_not_mix(s3: S3, model: S3Name, root: Path) -> None:
    other = S3Name(model.bucket, "other/model")
    s3.write(b"other", other.below("config.json"))
    assert copy_of(s3, other, root) != copy_of(s3, model, root)
    assert [path.name for path in copy_of(s3, other, root).iterdir()] == ["config.json"]


def test_a_damaged_copy_is_replaced(s3: S3, model: S3Name, root: Path) -> None:
    first = copy_of(s3, model, root)
    (first / "model.safetensors").write_bytes(b"short")
    assert (copy_of(s3, model, root) / "model.safetensors").read_bytes() == b"w" * 5000


def test_an_interrupted_copy_is_absent_and_continues(s3: S3, proxy: Proxy, model: S3Name, root: Path) -> None:
    proxy.disturb(only("GET", "model.safetensors", failing(403, "AccessDenied")))
    with pytest.raises(StorageError, match="access is denied"):
        copy_of(s3, model, root)
    assert [path.suffix for path in root.iterdir() if path.is_dir()] == [".partial"]
    assert copy_of(s3, model, root).is_dir()
    assert not list(root.glob("*.partial"))


def test_processes_share_one_download(s3: S3, proxy: Proxy, model: S3Name, root: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def held(handler: object) -> bool:
        reached.set()
        go_on.wait()
        return False

    proxy.disturb(only("GET", "model.safetensors", held))
    command = [sys.executable, "-c", FETCH, str(model), str(root)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    reached.wait()
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    go_on.set()
    outputs = {each.communicate()[0] for each in (first, second)}
    assert len(outputs) == 1
    assert len(gets(proxy)) == len(MODEL)


def test_a_killed_download_leaves_nothing_under_the_name_and_the_next_one_continues(
    s3: S3, proxy: Proxy, model: S3Name, root: Path
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def held(handler: object) -> bool:
        reached.set()
        go_on.wait()
        return False

    proxy.disturb(only("GET", "model.safetensors", held))
    process = subprocess.Popen([sys.executable, "-c", FETCH, str(model), str(root)], stdout=subprocess.DEVNULL)
    reached.wait()
    process.kill()
    process.wait()
    go_on.set()
    assert [path.suffix for path in root.iterdir() if path.is_dir()] == [".partial"]
    assert (copy_of(s3, model, root) / "model.safetensors").read_bytes() == b"w" * 5000


def sft(**values: object) -> SFTConfig:
    return SFTConfig.model_validate({"max_steps": 1, "data": {"type": "sft"}, **values})


def test_a_config_gets_the_paths_of_its_copies(s3: S3, model: S3Name, root: Path) -> None:
    s3.write(b'{"text": "a"}\n', S3Name(model.bucket, "rows.jsonl"))
    config = sft(model={"name": str(model)}, data={"type": "sft", "name": f"s3://{model.bucket}/rows.jsonl"})
    lines: list[str] = []
    local = staged(config, lines.append)
    assert (Path(local.model.name) / "config.json").read_bytes() == b"{}"
    assert local.tokenizer.name == local.model.name
    assert Path(local.data.name).read_bytes() == b'{"text": "a"}\n'  # type: ignore[union-attr]
    assert config.model.name == str(model), "the given config stays as it is"
    assert any(line.startswith(f"model.name = {model}: 3 files, 1 MB, in {root}") for line in lines)
    assert staged(sft(), lines.append) == sft()


def test_a_curriculum_on_s3_is_followed(s3: S3, model: S3Name, root: Path) -> None:
    rows = "".join(json.dumps({"id": name, "question": f"{name}?", "answer": name}) + "\n" for name in "abc")
    s3.write(rows.encode(), S3Name(model.bucket, "rows.jsonl"))
    s3.write(b"c\na\n", S3Name(model.bucket, "easy_first.txt"))
    place = f"s3://{model.bucket}"
    dataset = {"path": f"{place}/rows.jsonl", "order": f"{place}/easy_first.txt"}
    env = {"id": "rows", "args": {"datasets": [dataset]}}
    local = staged(OrchestratorConfig.model_validate({"env": [env]}), lambda line: None)
    problems = load_problems(read_rows_config(local.env[0].args))
    assert [problem.answer for problem in problems] == ["c", "a"]
    assert local.buffer.order == "sequential"


def test_images_beside_rows_on_s3_are_found_there(s3: S3, model: S3Name, root: Path) -> None:
    row = {"question": "A fracture?", "answer": "yes", "image": "scans/../scans/a.png"}
    s3.write(json.dumps(row).encode(), S3Name(model.bucket, "data/rows.jsonl"))
    wanted = f"s3://{model.bucket}/data/scans/a.png"
    dataset = {"path": f"s3://{model.bucket}/data/rows.jsonl"}
    local = staged(
        OrchestratorConfig.model_validate({"env": [{"id": "rows", "args": {"datasets": [dataset]}}]}), lambda line: None
    )
    for args in (local.env[0].args, {"datasets": [dataset]}):
        (problem,) = load_problems(read_rows_config(args))
        assert [part.source for part in image_parts(problem.prompt)] == [wanted]
    assert located("scans/a.png", folder_of(Path(local.env[0].args["datasets"][0]["path"]))) == wanted
    assert located("/x/a.png", folder_of(Path(dataset["path"]))) == "/x/a.png"
    s3.write(b"text", S3Name(model.bucket, "data/scans/a.png"))
    with pytest.raises(ImageFault, match=f"{wanted}: it is not an image"):
        read_image(
            "scans/a.png", folder_of(Path(local.env[0].args["datasets"][0]["path"])), ImageLimits(), StoredImages()
        )


def test_images_of_rows_are_downloaded_once(s3: S3, proxy: Proxy, bucket: str, root: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    s3.write(file.getvalue(), S3Name(bucket, "scans/a.png"))
    s3.write(b"text", S3Name(bucket, "scans/b.png"))
    fetch, limits = StoredImages(), ImageLimits(max_bytes=len(file.getvalue()))

    def fault(name: str, limits: ImageLimits = limits) -> str:
        with pytest.raises(ImageFault) as caught:
            read_image(name, root, limits, fetch)
        return str(caught.value)

    for _ in range(2):
        assert read_image(f"s3://{bucket}/scans/a.png", root, limits, fetch).size == (3, 2)
    assert len([path for path in gets(proxy) if "a.png" in path]) == 1
    scans = f"s3://{bucket}/scans"
    assert fault(f"{scans}/b.png") == f"{scans}/b.png: it is not an image of a known format ({KNOWN_FORMATS})"
    assert fault(f"{scans}/no.png") == f"{scans}/no.png: there is no object and no prefix with this name"
    assert fault(scans) == f"{scans} is a folder of 2 files, 1 MB, not an image"
    fetch = StoredImages()  # without the copy
    assert fault(f"{scans}/a.png", ImageLimits(max_bytes=10)) == f"{scans}/a.png has 1 MB, more than 1 MB"
    assert fault("s3://Bad_Bucket!/a.png").startswith("s3://Bad_Bucket!/a.png: ")


def test_every_input_that_is_missing_has_its_own_line(s3: S3, model: S3Name, root: Path) -> None:
    config = sft(model={"name": f"{model}-none"}, data={"type": "sft", "name": "s3://no-such-bucket-at-all/x"})
    with pytest.raises(StagingRefused) as raised:
        inputs_of(config, s3)
    assert sorted(raised.value.faults) == [
        "data.name: s3://no-such-bucket-at-all/x: there is no such bucket",
        f"model.name: {model}-none: there is no object and no prefix with this name",
    ]
    with pytest.raises(StagingRefused, match=r"^model.name: s3://x: a bucket's name has"):
        inputs_of(sft(model={"name": "s3://x"}), s3)


def test_a_cache_that_cannot_be_written_is_one_line(s3: S3, model: S3Name, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{CACHE_VARIABLE} names another directory$"):
        copy_of(s3, model, tmp_path / "file" / "cache")


def test_nothing_on_s3_imports_no_boto3() -> None:
    code = "import sys; import prime_rl.launch.run, prime_rl.storage; assert 'boto3' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


def test_without_boto3_the_line_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from prime_rl.storage import S3\nfrom prime_rl.utils.errors import StorageError\n"
        "try: S3.connect()\nexcept StorageError as error: print(error)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "S3 needs the package boto3: install it with `uv sync --inexact --extra s3`\n"
