"""Counts of cut and skipped rows, in the metrics and at the end of the log."""

from __future__ import annotations

import json
from pathlib import Path

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.sft.run import run


def test_rows_that_were_cut_or_left_out_are_counted_over_a_resume(tiny_model_dir: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a", "completion": "short"},
        {"prompt": "a", "completion": "longer than the rows " * 4},
        {"prompt": "a prompt that leaves no room " * 4, "completion": "never reached"},
        {"prompt": "b", "completion": "short too"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(file), "seq_len": 64, "batch_size": 2, "pack_function": "best_fit", "shuffle": False},
        "output_dir": tmp_path / "out",
    }
    assert run(SFTConfig(**config, max_steps=2, ckpt={"weights": None})) == 0
    assert run(SFTConfig(**config, max_steps=4, ckpt={"weights": None, "resume_step": -1})) == 0
    records = [json.loads(line) for line in RunPaths(tmp_path / "out").metrics.read_text().splitlines()]
    seen = [record["data/seen"] for record in records]
    assert seen == sorted(seen)
    last = records[-1]
    for kind in ("truncated", "untrainable"):
        assert abs(last[f"data/{kind}"] - last["data/seen"] / 4) <= 1
    assert last["data/overlong"] == last["data/unmaskable"] == 0

    end = capsys.readouterr().out.splitlines()[-3:]
    assert " 2 steps and " in end[0]
    assert f"; loss {records[2]['loss/mean']:.4f} -> {last['loss/mean']:.4f} (first and last step)" in end[0]
    assert end[1].endswith(
        f"Rows read so far: {last['data/seen']}; {last['data/truncated']} cut to data.seq_len, "
        f"{last['data/untrainable']} skipped: no trained token"
    )
    assert "SUCCESS SFT trainer finished! 4 steps" in end[2]
