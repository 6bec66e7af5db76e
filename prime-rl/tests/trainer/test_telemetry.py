"""Telemetry of trainers: benchmark, trace, metrics server, heartbeat, memory and MFU."""

from __future__ import annotations

import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import MetricsServerConfig
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, TrainerConfig
from prime_rl.launch.placement import reserved_ports
from prime_rl.monitors.base import Heartbeat
from prime_rl.monitors.prometheus import MetricsServer
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.kernels.attention import head_dims
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.perf import Peak, Performance, flops_per_token, measured_peak_flops
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.run import train as train_rl
from prime_rl.trainer.sft.run import run as run_sft
from prime_rl.trainer.telemetry import open_telemetry
from prime_rl.utils.engine_keys import key_file
from prime_rl.utils.errors import RunError
from prime_rl.utils.logger import setup_logger


@pytest.fixture
def sft(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"type": "fake", "input_ids": "random", "batch_size": 2, "seq_len": 64},
        "output_dir": tmp_path / "out",
    }


@pytest.fixture
def watchdog() -> Iterator[tuple[str, list[str]]]:
    """A server that responds with 200 under `/ok` and 404 elsewhere. Yields its URL and the requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/ok" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


# --- benchmark


def assert_is_bench(log: str, results: dict[str, Any]) -> None:
    assert re.search(r"Step +Throughput \(tokens/s\) +MFU \(%\) +Step time \(s\) +Peak memory \(GiB\)\n", log)
    rows = re.findall(r"^ +([123]|Overall) +(\d+\.\d\d)", log, re.MULTILINE)
    assert [name for name, _ in rows] == ["1", "2", "3", "Overall"]
    assert results.keys() == {"mfu", "throughput", "step_time", "peak_memory"}
    for name in ("mfu", "throughput", "step_time"):
        assert results[name]["min"] <= results[name]["mean"] <= results[name]["max"]
    assert 0 < results["peak_memory"]["pct"] < 100


def test_a_benchmark_of_sft_ends_with_a_table_and_leaves_no_weights(
    sft: dict[str, Any], tmp_path: Path, capsys
) -> None:
    file = tmp_path / "bench.json"
    assert run_sft(SFTConfig(**sft, bench={"output_json": file}, ckpt={})) == 0
    out = capsys.readouterr().out
    assert_is_bench(out, json.loads(file.read_text()))
    assert "measured now in float32 matrix products" in out
    paths = RunPaths(tmp_path / "out")
    assert not paths.weights.exists()
    assert not paths.checkpoints.exists()


def test_a_benchmark_of_the_rl_trainer_needs_no_orchestrator(tiny_model_dir: Path, tmp_path: Path, capsys) -> None:
    setup_logger("info")
    model = {"name": str(tiny_model_dir), "attn": "sdpa", "seq_len": 64}
    file = tmp_path / "bench.json"
    config = TrainerConfig(device="cpu", model=model, output_dir=tmp_path / "out", bench={"output_json": file})
    train_rl(config, RunPaths(config.output_dir))
    assert_is_bench(capsys.readouterr().out, json.loads(file.read_text()))


# --- profiles


def test_a_trace_can_be_read_by_chrome(sft: dict[str, Any], tmp_path: Path) -> None:
    assert run_sft(SFTConfig(**sft, trace_path=tmp_path / "traces", max_steps=2)) == 0
    with gzip.open(tmp_path / "traces" / "rank_0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"traced step 0", "traced step 1", "aten::mm"} <= names
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in events if event["ph"] == "X")


def test_a_memory_profile_is_one_of_a_gpu(sft: dict[str, Any], mesh: Mesh, tmp_path: Path) -> None:
    config = SFTConfig(**{**sft, "device": "auto"}, memory_profiler_path=tmp_path / "memory")
    with (
        pytest.raises(TrainerError, match="records a GPU's memory"),
        open_telemetry(config, RunPaths(tmp_path), mesh.process),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
def test_memory_snapshots_are_written_for_every_step(sft: dict[str, Any], tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    assert run_sft(SFTConfig(**{**sft, "device": "cuda"}, memory_profiler_path=memory, max_steps=2)) == 0
    assert sorted(file.name for file in memory.iterdir()) == ["rank_0_step_0.pickle", "rank_0_step_1.pickle"]


# --- metrics server and heartbeat


def page(url: str, key: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def gauges(text: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_prometheus_reads_the_last_step_and_the_health() -> None:
    with reserved_ports(1) as (port,):
        server = MetricsServer(MetricsServerConfig(host="127.0.0.1", port=port))
    root = f"http://127.0.0.1:{port}"
    assert page(f"{root}/health") == "ok\n"
    key = key_file(port, "metrics").read_text()
    before = gauges(page(f"{root}/metrics", key))
    assert set(before.values()) == {"0.0"}
    assert {"trainer_step", "trainer_loss", "trainer_mfu_percent", "trainer_runs_max"} <= before.keys()
    server.log({"loss/mean": 0.5, "optim/lr": 1e-3, "kl_ent_ratio/mean": float("nan"), "time/step": 1.0}, step=3)
    server.log({"val/loss": 9.0}, step=4)
    text = page(f"{root}/metrics", key)
    values = gauges(text)
    assert before.keys() <= values.keys()
    assert values["trainer_step"] == "3.0"
    assert values["trainer_loss"] == "0.5"
    assert values["trainer_kl_ent_ratio"] == "nan"
    assert values['trainer_run_learning_rate{run="run_default"}'] == "0.001"
    assert (values["trainer_runs_active"], values["trainer_mfu_percent"]) == ("1.0", "0.0")
    assert text.count("# TYPE trainer_loss gauge\n") == 1
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page(f"{root}/elsewhere", key)
    server.close()
    assert not key_file(port, "metrics").exists()


def test_metrics_need_their_key_unless_they_are_public() -> None:
    for public in (False, True):
        with reserved_ports(1) as (port,):
            server = MetricsServer(MetricsServerConfig(port=port, public=public))
        url = f"http://127.0.0.1:{port}/metrics"
        if public:
            assert "trainer_step" in page(url)
        for key in () if public else ("", "wrong"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                page(url, key)
        server.close()


def test_a_port_in_use_is_one_line(sft: dict[str, Any], mesh: Mesh, tmp_path: Path) -> None:
    with reserved_ports(1) as (port,):
        config = MetricsServerConfig(host="127.0.0.1", port=port)
        server = MetricsServer(config)
    with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        MetricsServer(config)
    server.close()


def test_a_watchdog_gets_a_request_per_step_and_may_fail(
    sft: dict[str, Any], watchdog: tuple[str, list[str]], capsys
) -> None:
    url, asked = watchdog
    assert run_sft(SFTConfig(**sft, heartbeat={"url": f"{url}/ok"}, max_steps=3)) == 0
    # A beat is skipped while the previous request is pending.
    assert 1 <= len(asked) <= 3
    assert "heartbeat" not in capsys.readouterr().out
    setup_logger("info")
    failing = Heartbeat(f"{url}/nowhere")
    failing.beat()
    failing.close()
    assert f"Heartbeat request to {url}/nowhere failed: 404" in capsys.readouterr().out


# --- MFU


def test_a_frozen_weight_costs_two_products_and_a_trained_one_three(tiny_model_dir: Path, mesh: Mesh) -> None:
    model_config = ModelConfig(name=str(tiny_model_dir), attn="sdpa")
    # Two layers with q and o of 64 x 64, k and v of 64 x 32, and three MLP matrices of 64 x 128; a head of 64 x 128.
    layers, head, attention = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 64 * 128, 12 * 2 * 64 * 100
    assert flops_per_token(setup_model(model_config, mesh), 100) == 6 * (layers + head) + attention
    lora = model_config.model_copy(update={"lora": LoRAConfig(rank=4, target_modules=["q_proj"], modules_to_save=[])})
    adapters = 2 * 4 * (64 + 64)
    assert flops_per_token(setup_model(lora, mesh), 100) == 4 * (layers + head) + 6 * adapters + attention


@pytest.mark.parametrize(("row_tokens", "ratio"), [(8_192, 1.44), (16_384, 1.61), (65_536, 1.86)])
def test_equal_speed_prints_a_higher_mfu_than_upstreams_formula(row_tokens: int, ratio: float) -> None:
    """Upstream uses a head size of hidden size / heads, which is 64 for Qwen3-0.6B, but its heads have 128 channels."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert flops_per_token(model, row_tokens) == 6 * parameters + 12 * 28 * 16 * 128 * row_tokens
    of_upstream = 6 * parameters + 12 * 28 * 16 * (1024 // 16) * row_tokens
    assert round(flops_per_token(model, row_tokens) / of_upstream, 2) == ratio


@pytest.mark.parametrize(
    ("family", "experts", "visited", "sizes"),
    [
        ("qwen3_moe", "num_experts", "num_experts_per_tok", {}),
        ("deepseek_v3", "n_routed_experts", "num_experts_per_tok", {"n_group": 1, "first_k_dense_replace": 0}),
        ("ernie4_5_moe", "moe_num_experts", "moe_k", {"moe_layer_start_index": 0}),
        ("hunyuan_v1_moe", "num_experts", "moe_topk", {"head_dim": 8}),
        ("gemma4_text", "num_experts", "top_k_experts", {"enable_moe_block": True, "hidden_size_per_layer_input": 0}),
    ],
)
def test_flops_are_those_of_the_experts_that_a_token_visits(
    family: str, experts: str, visited: str, sizes: dict[str, Any]
) -> None:
    """More experts add the product of the router alone; a visit adds that of one expert."""

    def flops(count: int, visits: int) -> float:
        common = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, experts: count, visited: visits}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **heads, **sizes))
        return flops_per_token(model, 1)

    width = 24 if family == "hunyuan_v1_moe" else 8
    of_biases = 4 * 8 if family == "ernie4_5_moe" else 0
    assert flops(16, 2) - flops(8, 2) == 6 * 8 * 16 + of_biases
    assert flops(8, 3) - flops(8, 2) == 6 * 3 * 16 * width


def test_flops_of_attention_are_those_of_each_layers_heads() -> None:
    kinds = ["sliding_attention", "full_attention"]
    with torch.device("meta"):
        gemma4 = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gemma4_text", num_hidden_layers=2, layer_types=kinds, head_dim=32, vocab_size=64)
        )
    assert head_dims(gemma4.config) == [32, 512]
    assert flops_per_token(gemma4, 101) - flops_per_token(gemma4, 1) == 12 * 8 * (32 + 512) * 100


def test_the_measured_peak_is_that_of_matrix_products() -> None:
    assert 1e8 < measured_peak_flops(torch.float32) < 1e14


def performance_of(peak: Peak) -> Performance:
    config = Qwen3Config(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    performance = Performance(model, 16, Process(0, 1, 0, torch.device("cpu")), peak)
    performance.step(0)
    return performance


def test_a_speed_above_a_measured_peak_measures_it_again() -> None:
    peak = Peak(1.0, torch.float32)
    assert 0 < performance_of(peak).step(1)["perf/mfu"] <= 100
    assert peak.flops > 1e8


def test_a_speed_above_the_peak_has_no_mfu_and_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("warning")
    performance = performance_of(Peak(1.0))
    for _ in range(3):
        metrics = performance.step(1)
        assert "perf/throughput" in metrics
        assert "perf/mfu" not in metrics
    assert capsys.readouterr().out.count("is left out while it is above 100%") == 1
