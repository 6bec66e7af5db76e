"""A run is copied to S3 while it goes on: whole steps or none, whatever S3 does, and back on another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from s3_server import Proxy, failing, only

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.storage import StorageConfig
from prime_rl.run.paths import RunPaths
from prime_rl.storage import S3, S3Name
from prime_rl.storage.copies import RemoteRun, RunCopy, upload_run
from prime_rl.storage.uploader import Hold, Uploader, UploadThread, mark_uploaded, summary_of, write_plan
from prime_rl.utils.errors import StorageError, UserError
from prime_rl.utils.files import STABLE, replacing_directory


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run with two checkpoints, weights, a kept rollout, and files that belong to this machine alone."""
    paths = RunPaths(tmp_path / "out")
    for step in (2, 4):
        save(paths, step)
    with replacing_directory(paths.weight(4)) as scratch:
        (scratch / "model.safetensors").write_bytes(b"exported")
    paths.metrics.write_text('{"step": 0}\n')
    for file in (paths.log("trainer"), paths.config("sft"), paths.receipt(1), paths.orchestrator.step_samples(0)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.name}\n")
    (paths.root / "run.lock").write_text("{}")
    paths.orchestrator.broadcast(3).mkdir(parents=True)
    (paths.orchestrator.broadcast(3) / "model.safetensors").write_bytes(b"policy")
    return paths


def save(paths: RunPaths, step: int) -> None:
    with replacing_directory(paths.checkpoint(step)) as scratch:
        (scratch / "trainer").mkdir()
        (scratch / "trainer" / "rank_0.pt").write_bytes(os.urandom(2000))


@pytest.fixture
def name(bucket: str) -> S3Name:
    return S3Name(bucket, "runs/one")


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def uploader(s3: S3, paths: RunPaths, name: S3Name, lines: list[str]) -> Uploader:
    return Uploader(s3, paths, name, samples=True, say=lines.append)


def held(s3: S3, name: S3Name) -> dict[str, int]:
    return {each.name.key[len(name.prefix) :]: each.size_bytes for each in s3.objects(name)}


def puts(proxy: Proxy, part: str) -> list[str]:
    return [path for method, path in proxy.seen if method == "PUT" and part in path]


def test_a_look_copies_what_a_run_has_and_the_next_one_only_what_is_new(
    s3: S3, proxy: Proxy, paths: RunPaths, name: S3Name, uploader: Uploader, lines: list[str]
) -> None:
    assert uploader.look()
    step = {f"checkpoints/step_{step}/{file}" for step in (2, 4) for file in (STABLE, "trainer/rank_0.pt")}
    assert set(held(s3, name)) == step | {
        *("weights/step_4/STABLE", "weights/step_4/model.safetensors", "metrics.jsonl", "logs/trainer.log"),
        *("configs/sft.toml", "attempts/001.json", "run_default/samples/step_0.jsonl.gz"),
    }
    assert puts(proxy, "step_4")[1].endswith("/STABLE")
    proxy.calm()
    paths.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert uploader.look()
    assert [path.rpartition("/")[2].partition("?")[0] for path in puts(proxy, "runs")] == ["metrics.jsonl"]
    assert held(s3, name)["metrics.jsonl"] == 24
    assert summary_of(uploader) == (True, f"uploaded to {name}: 12 files, 1 MB")
    assert lines == []


def test_another_process_uploads_only_what_s3_lacks(
    s3: S3, proxy: Proxy, paths: RunPaths, name: S3Name, uploader: Uploader
) -> None:
    uploader.look()
    s3.delete(name.below("checkpoints/step_2/STABLE"))
    (paths.uploaded(paths.checkpoint(2))).unlink()
    (paths.uploaded(paths.checkpoint(4))).unlink()
    proxy.calm()
    assert Uploader(s3, paths, name, True, print).look()
    assert [path.partition("?")[0].rpartition("one/")[2] for path in puts(proxy, "runs")] == [
        "checkpoints/step_2/STABLE"
    ]


def test_texts_and_pictures_of_rollouts_can_stay_here(s3: S3, paths: RunPaths, name: S3Name) -> None:
    for file in (paths.contact_sheet, paths.pictures / "ab12.jpg"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("a picture")
    Uploader(s3, paths, name, samples=False, say=print).look()
    private = ("samples", "pictures", "contact_sheet")
    assert not [path for path in held(s3, name) if any(part in path for part in private)]
    Uploader(s3, paths, name, samples=True, say=print).look()
    assert all(any(part in path for path in held(s3, name)) for part in private)


def test_a_step_that_did_not_arrive_has_no_marker_and_the_failure_is_told_once(
    s3: S3, proxy: Proxy, paths: RunPaths, name: S3Name, uploader: Uploader, lines: list[str]
) -> None:
    proxy.disturb(only("PUT", "step_4/trainer", failing(403, "AccessDenied")), times=2)
    assert not uploader.look()
    assert not uploader.look()
    assert not [path for path in held(s3, name) if path.startswith("checkpoints/step_4")]
    assert "metrics.jsonl" in held(s3, name)
    is_whole, line = summary_of(uploader)
    assert not is_whole
    assert line.startswith(f"not uploaded to {name}: checkpoints/step_4, checkpoints/step_2, weights/step_4 (")
    assert line.endswith(f"; 2 uploads failed); upload the rest with\n  medarc_train upload {paths.root}")
    assert uploader.look()
    assert [line.partition(":")[0] for line in lines] == ["warning", "uploads to s3"]
    assert "lack the right s3:PutObject; the run goes on" in lines[0]
    assert lines[1] == f"uploads to {name} work again"
    assert summary_of(uploader)[1].endswith("; 2 uploads failed")


@pytest.mark.parametrize("fault", [failing(500, "InternalError"), failing(503, "SlowDown")])
def test_a_server_that_fails_for_a_moment_is_not_even_told(
    proxy: Proxy, uploader: Uploader, lines: list[str], fault: object
) -> None:
    proxy.disturb(only("PUT", "step_4/trainer", fault), times=2)  # type: ignore[arg-type]
    assert uploader.look()
    assert lines == []


def test_the_end_of_a_run_waits_for_s3_only_so_long(proxy: Proxy, uploader: Uploader) -> None:
    proxy.disturb(only("PUT", "step_4/trainer", failing(403, "AccessDenied")), times=1000)
    thread = UploadThread(uploader, every_s=1000)
    thread.finish(limit_s=0, asked_to_stop=lambda timeout_s: False)
    assert not summary_of(uploader)[0]
    proxy.calm()
    again = UploadThread(uploader, every_s=1000)
    again.finish(limit_s=0, asked_to_stop=lambda timeout_s: False)
    assert summary_of(uploader)[0]


def test_ctrl_c_ends_that_wait(proxy: Proxy, uploader: Uploader) -> None:
    proxy.disturb(only("PUT", "step_4/trainer", failing(403, "AccessDenied")), times=1000)
    UploadThread(uploader, every_s=1000).finish(limit_s=10**6, asked_to_stop=lambda timeout_s: True)
    assert not summary_of(uploader)[0]


def test_checkpoints_wait_for_their_upload_up_to_a_number(paths: RunPaths) -> None:
    doomed = [paths.checkpoint(step) for step in (1, 2, 3)]
    assert Hold(paths).released(doomed) == doomed, "a run that is not copied holds nothing"
    write_plan(paths, "s3://bucket/run", max_held=2)
    assert Hold(paths).released(doomed) == doomed[:1]
    mark_uploaded(paths, doomed[1], "s3://bucket/run")
    assert Hold(paths).released(doomed) == [doomed[1]]


def test_a_run_comes_back_with_its_newest_whole_checkpoint(
    s3: S3, paths: RunPaths, name: S3Name, uploader: Uploader, tmp_path: Path, lines: list[str]
) -> None:
    uploader.look()
    there = RunPaths(tmp_path / "there")
    s3.write(b"half of it", name.below("checkpoints/step_6/trainer/rank_0.pt"))
    assert RemoteRun(s3, name, there).steps == [2, 4]
    assert RemoteRun(s3, name, there).restore(-1, lines.append)
    assert (there.checkpoint(4) / "trainer" / "rank_0.pt").read_bytes() == (
        paths.checkpoint(4) / "trainer" / "rank_0.pt"
    ).read_bytes()
    assert not there.checkpoint(2).exists()
    assert there.metrics.read_text() == paths.metrics.read_text()
    assert not there.config("sft").exists(), "each launch writes its own configs"
    assert not RemoteRun(s3, name, there).restore(-1, lines.append), "what is here is not downloaded again"
    assert RemoteRun(s3, name, there).restore(2, lines.append)
    assert there.checkpoint(2).exists()


def test_a_checkpoint_whose_hashes_differ_is_passed_over(
    s3: S3, name: S3Name, uploader: Uploader, tmp_path: Path, lines: list[str]
) -> None:
    uploader.look()
    s3.write(os.urandom(2000), name.below("checkpoints/step_4/trainer/rank_0.pt"))
    there = RunPaths(tmp_path / "there")
    assert RemoteRun(s3, name, there).restore(-1, lines.append)
    assert there.checkpoint(2).exists()
    assert not there.checkpoint(4).exists()
    assert any("rank_0.pt has changed since it was written" in line for line in lines)


def test_steps_that_a_resume_repeats_are_no_longer_whole_on_s3(
    s3: S3, paths: RunPaths, name: S3Name, uploader: Uploader
) -> None:
    uploader.look()
    RemoteRun(s3, name, paths).forget_after(2)
    assert RemoteRun(s3, name, paths).steps == [2]
    assert "weights/step_4/STABLE" not in held(s3, name)


def test_a_step_that_a_resumed_run_writes_again_is_uploaded_again(s3: S3, paths: RunPaths, name: S3Name) -> None:
    Uploader(s3, paths, name, samples=True, say=print).look()
    RemoteRun(s3, name, paths).forget_after(2)
    resumed = Uploader(s3, paths, name, samples=True, say=print)
    assert resumed.look()
    assert RemoteRun(s3, name, paths).steps == [2], "the abandoned step 4 stays away"
    save(paths, 4)
    assert resumed.look()
    assert RemoteRun(s3, name, paths).steps == [2, 4]


def test_what_is_on_s3_at_one_place_is_not_at_another(s3: S3, paths: RunPaths, name: S3Name, lines: list[str]) -> None:
    Uploader(s3, paths, name, samples=True, say=print).look()
    other = S3Name(name.bucket, "runs/other")
    assert upload_run(paths, other, True, lines.append)[0]
    assert RemoteRun(s3, other, paths).steps == [2, 4]


def test_keys_that_lead_out_of_a_run_are_refused(s3: S3, tmp_path: Path, name: S3Name) -> None:
    for key in ("../../outside", "/absolute"):
        s3.write(b"evil", name.below(key))
        there = RunPaths(tmp_path / "a" / "b")
        with pytest.raises(StorageError, match="which cannot be a file: parts of a key must not be empty"):
            RemoteRun(s3, name, there).mirror(print)
        assert not list(tmp_path.rglob("outside"))
        s3.delete(name.below(key))


def test_a_file_whose_name_is_no_text_does_not_end_the_uploads(paths: RunPaths, uploader: Uploader) -> None:
    odd = paths.logs / os.fsdecode(b"\xff.log")
    odd.write_text("x")
    assert not uploader.look()
    odd.unlink()
    assert uploader.look()


def copy_of(name: S3Name, paths: RunPaths) -> RunCopy:
    copy = RunCopy.of(StorageConfig(upload_to=str(name)), paths, print)
    assert copy is not None
    return copy


def test_a_place_with_another_run_or_without_rights_is_refused(
    proxy: Proxy, paths: RunPaths, name: S3Name, uploader: Uploader, tmp_path: Path
) -> None:
    there = RunPaths(tmp_path / "there")
    proxy.disturb(only("PUT", "writer.json", failing(403, "AccessDenied")))
    with pytest.raises(UserError, match=r"writer.json: access is denied: the credentials lack the right s3:PutObject$"):
        copy_of(name, there).restore(None, is_evaluation=False, dry_run=False)
    uploader.look()
    with pytest.raises(UserError, match="holds the checkpoints of another run: choose another output_dir"):
        copy_of(name, there).restore(None, is_evaluation=False, dry_run=False)
    with pytest.raises(UserError, match="there is no such bucket"):
        copy_of(S3Name("no-such-bucket-of-ours", "x"), there).restore(-1, is_evaluation=False, dry_run=True)
    assert not there.root.exists()


def test_the_rest_is_uploaded_by_a_command(s3: S3, paths: RunPaths, name: S3Name, lines: list[str]) -> None:
    with pytest.raises(UserError, match="was not copied to S3 before: say where with --to"):
        upload_run(paths, None, True, lines.append)
    write_plan(paths, str(name), max_held=1)
    assert upload_run(paths, None, True, lines.append) == (True, f"uploaded to {name}: 11 files, 1 MB")


def test_an_output_directory_on_s3_is_a_local_one_that_is_copied() -> None:
    config = SFTConfig.model_validate({"output_dir": "s3://bucket/runs/a", "max_steps": 1})
    assert config.output_dir == Path("outputs/s3/bucket/runs/a")
    assert config.storage.upload_to == "s3://bucket/runs/a"
    placed = SFTConfig.model_validate({"output_dir": Path("s3://bucket/a"), "storage": {"work_dir": "/fast/a"}})
    assert placed.output_dir == Path("/fast/a")
    with pytest.raises(ValueError, match="is not the name of a place on S3"):
        StorageConfig(upload_to="outputs/here")
    with pytest.raises(ValueError, match="a bucket's name has"):
        SFTConfig.model_validate({"output_dir": "s3://x/y"})


def test_readers_of_a_run_get_everything_but_steps_and_only_what_changed(
    s3: S3, proxy: Proxy, paths: RunPaths, name: S3Name, uploader: Uploader, tmp_path: Path
) -> None:
    uploader.look()
    there = RunPaths(tmp_path / "there")
    RemoteRun(s3, name, there).mirror(print)
    assert there.metrics.read_text() == paths.metrics.read_text()
    assert there.config("sft").exists()
    assert not there.checkpoints.exists()
    paths.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    uploader.look()
    proxy.calm()
    RemoteRun(s3, name, there).mirror(print)
    assert [path for method, path in proxy.seen if method == "GET" and "list-type" not in path] == [
        f"/{name.bucket}/runs/one/metrics.jsonl"
    ]
