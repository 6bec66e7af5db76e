"""A whole run: how shared settings reach the components, and what the components must agree on."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import ModelConfig, MuonConfig, TrainerConfig
from prime_rl.utils.pydantic_config import ConfigWarning, load_config, to_toml

RL = ("--trainer", "--orchestrator", "--inference")


def words(options: str) -> list[str]:
    return [f"--{option}" for option in options.split()]


def test_shared_values_reach_every_component(rl) -> None:
    run = rl(*words("model.name=m max-steps=5 max-async-level=2 seq-len=64 output-dir=out ckpt.interval=3 device=cpu"))
    for component in (run.trainer, run.orchestrator):
        assert (component.max_steps, component.max_async_level, component.ckpt.interval) == (5, 2, 3)
        assert component.model.name == "m"
    assert (run.trainer.model.seq_len, run.orchestrator.seq_len) == (64, 64)
    assert (run.trainer.output_dir, run.orchestrator.output_dir) == (Path("out"), Path("out/run_default"))
    assert (run.inference.model.name, run.inference.device, run.trainer.device) == ("m", "cpu", "cpu")


def test_the_tokenizer_follows_the_shared_model(rl) -> None:
    assert rl("--model.name=m").trainer.tokenizer.name == "m"


def test_an_engine_that_can_sleep_does_so_while_the_trainer_computes(rl) -> None:
    assert rl(*words("inference.enable-sleep-mode max-async-level=0")).orchestrator.servers_sleep
    assert not rl(*words("inference.enable-sleep-mode orchestrator.servers-sleep=false")).orchestrator.servers_sleep
    assert not rl(*words("max-async-level=0")).orchestrator.servers_sleep


def test_the_orchestrator_knows_what_the_server_takes(rl) -> None:
    assert rl(*words("seq-len=64 inference.model.max-model-len=48")).orchestrator.max_model_len == 48
    assert rl(*words("seq-len=64")).orchestrator.max_model_len is None


def test_a_server_that_cannot_sleep_is_not_asked_to(rl_faults) -> None:
    faults = rl_faults(*words("max-async-level=0 orchestrator.servers-sleep"))
    assert any("orchestrator.servers_sleep needs inference.enable_sleep_mode" in fault for fault in faults)


def test_shared_seq_len_only_fills(rl) -> None:
    run = rl(*words("seq-len=64 trainer.model.seq-len=128"))
    assert (run.trainer.model.seq_len, run.orchestrator.seq_len) == (128, 64)


def test_logs_are_shared_unless_nulled(rl) -> None:
    run = rl(*words("log.level=debug log.no-file trainer.log.vf-level=warn".replace("log.no-file", "no-log.file")))
    assert (run.trainer.log.level, run.orchestrator.log.file, run.trainer.log.vf_level) == ("debug", False, "warn")
    assert rl(*words("log.level=null trainer.log.level=error")).trainer.log.level == "error"
    assert rl(*words("trainer.log.level=error")).trainer.log.level == "info"


def test_shared_wandb_names_each_component(rl) -> None:
    run = rl(*words("wandb.name=n wandb.project=p wandb.offline"))
    assert (run.trainer.wandb.name, run.orchestrator.wandb.name) == ("n-trainer", "n-orchestrator")
    assert (run.trainer.wandb.project, run.orchestrator.wandb.offline) == ("p", True)


def test_shared_checkpoints_keep_what_they_do_not_set(rl) -> None:
    run = rl(*words("ckpt.keep-last=2 trainer.ckpt.keep-interval=7"))
    assert (run.trainer.ckpt.keep_last, run.trainer.ckpt.keep_interval) == (2, 7)
    assert (run.orchestrator.ckpt.keep_last, run.orchestrator.ckpt.keep_interval) == (2, None)


def test_rules_that_end_a_run_and_the_best_checkpoint_are_set_once(rl) -> None:
    options = (
        "ckpt.interval=5 ckpt.keep-best orchestrator.eval.interval=10 early-stop.patience=3 early-stop.min-delta=0.01"
    )
    run = rl(*words(options))
    assert run.trainer.ckpt.keep_best
    assert run.orchestrator.ckpt.keep_best
    assert (run.orchestrator.early_stop.patience, run.orchestrator.early_stop.min_delta) == (3, 0.01)
    assert rl(*words("bench early-stop.constant-reward-steps=5")).orchestrator.early_stop is None


def test_a_resumed_run_waits_for_the_trainer_that_starts_with_it(rl) -> None:
    key = "wait_for_weights_timeout"
    assert getattr(rl("--ckpt").orchestrator.ckpt, key) is None
    assert getattr(rl("--ckpt.resume-step=-1").orchestrator.ckpt, key) == 600
    own = rl("--ckpt.resume-step=-1", "--orchestrator.ckpt.wait-for-weights-timeout=5")
    assert getattr(own.orchestrator.ckpt, key) == 5
    none = rl("--ckpt.resume-step=-1", "--orchestrator.ckpt.wait-for-weights-timeout=None")
    assert getattr(none.orchestrator.ckpt, key) is None


def test_shared_max_steps_serve_a_temperature_schedule(rl) -> None:
    schedule = '{"start_temperature": 1, "end_temperature": 0.5}'
    run = rl("--orchestrator.sampling.temp-scheduler", schedule, "--max-steps=5")
    assert run.orchestrator.max_steps == 5


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ("max-steps=5 trainer.max-steps=6", "max_steps makes trainer.max_steps 5; the config's own .* = '6'"),
        ("model.name=m inference.model.name=n", "model.name makes inference.model.name 'm'"),
        ("trainer.log.level=debug", "log.level makes trainer.log.level 'info'"),
        (
            "deployment.num-infer-gpus=4 inference.parallel.tp=4 inference.parallel.dp=2",
            "makes inference.parallel.dp 1",
        ),
        ("wandb.name=n trainer.wandb.name=m", "wandb.name makes trainer.wandb.name 'n-trainer'"),
        ("output-dir=a trainer.output-dir=b", "output_dir makes trainer.output_dir"),
        ("trainer-gpu-ids=1,2 deployment.num-train-gpus=3", "GPU ids make deployment.num_train_gpus 2"),
    ],
)
def test_a_shared_value_that_wins_over_another_says_so(rl, options: str, warning: str) -> None:
    with pytest.warns(ConfigWarning, match=warning):
        rl(*words(options))


@pytest.mark.parametrize("options", ["max-steps=5 trainer.max-steps=5", "bench max-steps=5", "trainer.log.level=info"])
def test_equal_values_are_no_conflict(rl, recwarn, options: str) -> None:
    rl(*words(options))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("trainer.max-steps=5", "trainer.max_steps (5) and orchestrator.max_steps (None) differ"),
        ("orchestrator.max-async-level=2", "trainer.max_async_level (1) and orchestrator.max_async_level (2) differ"),
        ("trainer.ckpt", "trainer.ckpt is set and orchestrator.ckpt is not"),
        ("trainer.ckpt.interval=1 orchestrator.ckpt.interval=2", "trainer.ckpt.interval (1) and"),
        ("trainer.ckpt.resume-step=1 orchestrator.ckpt", "trainer.ckpt.resume_step (1) and"),
        (
            "trainer.ckpt.interval=5 trainer.ckpt.keep-best orchestrator.ckpt.interval=5",
            "trainer.ckpt.keep_best (True) and orchestrator.ckpt.keep_best (False) differ: set ckpt.keep_best once",
        ),
        ("early-stop.patience=2", "early_stop.patience and early_stop.target need [eval]"),
        ("ckpt.interval=5 ckpt.keep-best", "ckpt.keep_best needs [eval]"),
        (
            "ckpt.interval=4 ckpt.keep-best orchestrator.eval.interval=10",
            "eval.interval (10) is not a multiple of ckpt.interval (4)",
        ),
        ("ckpt.keep-best orchestrator.eval", "ckpt.keep_best needs ckpt.interval: only versions"),
        ("orchestrator.wandb", "orchestrator.wandb is set and trainer.wandb is not"),
        ("trainer.wandb orchestrator.wandb.project=x", "trainer.wandb.project (prime-rl) and"),
        ("trainer.model.name=x orchestrator.model.name=x", "trainer.model.name ('x') and inference.model.name"),
        ("orchestrator.seq-len=4096", "trainer.model.seq_len (2048) is below orchestrator.seq_len (4096)"),
        ("max-steps=5 trainer.scheduler.type=linear", "do not fit into max_steps = 5"),
        ("trainer.model.dp-replicate=2", "model.dp_replicate = 2 does not divide the 1 trainer processes"),
        ("trainer.bench", "only one of trainer.bench and orchestrator.bench is on"),
        ("trainer.model.lora orchestrator.model.lora.rank=3", "trainer.model.lora.rank (16) and"),
        ("orchestrator.model.lora", "orchestrator.model.lora is set and trainer.model.lora is not"),
        (
            "trainer.model.lora.modules_to_save=norm orchestrator.model.lora",
            "orchestrator.model.lora with trainer.model.lora.modules_to_save: the trainer sends whole weights",
        ),
        ("deployment.num-infer-gpus=0", "deployment.num_infer_gpus is 0: give [inference] a GPU"),
        ("deployment.num-infer-gpus=3 inference.parallel.tp=2", "inference: 3 GPUs / parallel.tp 2 = 1.5 copies"),
        (
            "deployment.num-infer-gpus=3 inference.parallel.dp=2",
            "inference: 3 GPUs / parallel.dp 2 = 1.5 GPUs for each",
        ),
        ("deployment.num-train-gpus=3 trainer.model.cp=2", "model.cp = 2 does not divide the 3 trainer processes"),
        (
            "deployment.num-train-gpus=5 deployment.num-infer-gpus=4",
            "5 train + 4 infer = 9 GPUs, but gpus_per_node is 8",
        ),
        ("trainer.loss.teacher-tau=1", "trainer.loss.teacher_tau needs a teacher: set deployment.num_teacher_gpus"),
        ("teacher-inference.model.name=x", "[teacher_inference] has no GPU: set deployment.num_teacher_gpus"),
        (
            "device=cpu teacher-inference.enable-lora=true",
            "teacher_inference.enable_lora: a teacher serves no adapters",
        ),
        ("orchestrator.teacher-model.model.name=x", "names the server of the model that is trained"),
        (
            "device=cpu teacher-inference.model.name=x trainer.loss.type=gspo",
            "no effect with trainer.loss.type = 'gspo'",
        ),
        (
            "device=cpu teacher-inference.model.max-model-len=128 seq-len=128",
            "teacher_inference.model.max_model_len (128) is too short for sequences of orchestrator.seq_len (128) "
            "tokens: set it to 129 or more",
        ),
        ("trainer.rollout-transport.type=zmq", "trainer.rollout_transport.type (zmq) and"),
        ("inference.weight-broadcast.type=nccl", "and inference.weight_broadcast.type ('nccl') differ"),
        ("deployment.num-teacher-gpus=1 teacher-inference.server.port=8000", "are both 8000: change one"),
        ("max-async-level=-4", "--max-async-level: should be at least 0"),
        ("ckpt.interval=-5", "--ckpt.interval: should be at least 1"),
    ],
)
def test_components_that_do_not_fit_are_one_fault(rl_faults, options: str, fault: str) -> None:
    found = rl_faults(*words(options))
    assert len(found) == 1
    assert fault in found[0]


def test_the_async_rule_holds_after_sharing(rl_faults) -> None:
    found = rl_faults(*words("weight-broadcast.type=nccl max-async-level=2"))
    assert [fault.split(": ")[1] for fault in found] == ["trainer", "orchestrator"]
    assert all("needs max_async_level = 1 (got 2)" in fault for fault in found)


def test_nccl_needs_two_gpus(faults) -> None:
    options = words("trainer.weight-broadcast.type=nccl orchestrator.weight-broadcast.type=nccl")
    options += words("deployment.num-infer-gpus=0")
    assert "NCCL weight broadcast needs two GPUs (got 1 train + 0 infer)" in faults(RLConfig, *RL[:2], *options)[0]


def test_nccl_needs_gpus_of_each_sides_own(rl_faults) -> None:
    options = words("weight-broadcast.type=nccl inference-gpu-ids=[0,1] trainer-gpu-ids=[1,2]")
    assert "inference_gpu_ids and trainer_gpu_ids share 1" in rl_faults(*options)[0]


def test_on_a_cpu_weights_are_sent_without_gpus(rl) -> None:
    run = rl(*words("weight-broadcast.type=nccl device=cpu"))
    assert run.trainer.weight_broadcast.inference_world_size == 1


def test_every_inference_gpu_is_used_and_counted_for_nccl(rl) -> None:
    run = rl(*words("deployment.num-infer-gpus=4 inference.parallel.tp=2 weight-broadcast.type=nccl"))
    assert (run.inference.parallel.dp, run.inference.api_server_count) == (2, 2)
    assert run.trainer.weight_broadcast.inference_world_size == 4
    assert (run.orchestrator.weight_broadcast.type, run.inference.weight_broadcast.type) == ("nccl", "nccl")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("inference.parallel.dp=2", (2, 2, False)),
        ("inference.parallel.dp=2 trainer.model.ep=2 inference.backend=vllm", (2, 2, True)),
        ("trainer.model.ep=2", (1, 4, False)),  # the embedded engine may serve, which has no such key
        ("trainer.model.ep=2 inference.backend=vllm inference.enable-expert-parallel=false", (1, 4, False)),
    ],
)
def test_engines_divide_their_gpus_as_the_placement_says(rl, options: str, expected: tuple[int, int, bool]) -> None:
    run = rl(*words(f"deployment.num-infer-gpus=4 deployment.num-train-gpus=4 {options}"))
    parallel = run.inference.parallel
    assert (parallel.tp, parallel.dp, run.inference.enable_expert_parallel) == expected


def test_nccl_set_on_the_components_reaches_the_server(rl) -> None:
    run = rl(*words("trainer.weight-broadcast.type=nccl orchestrator.weight-broadcast.type=nccl"))
    assert run.inference.weight_broadcast.type == "nccl"


def test_a_shared_broadcast_keeps_the_keys_of_its_own_type(rl) -> None:
    run = rl(*words("weight-broadcast trainer.weight-broadcast.save-format=torch"))
    assert run.trainer.weight_broadcast.save_format == "torch"
    run = rl(
        "--weight-broadcast.type=nccl", "--trainer.weight-broadcast", '{"type": "filesystem", "save_sharded": false}'
    )
    assert run.trainer.weight_broadcast.port == 29501


def test_training_workers_leave_out_context_and_tensor_parallel_ranks(rl) -> None:
    options = words("deployment.num-train-gpus=4 deployment.num-infer-gpus=1 trainer.model.cp=2")
    assert rl(*options).orchestrator.num_train_workers == 2
    assert rl("--orchestrator.num-train-workers=3").orchestrator.num_train_workers == 3


def test_a_benchmark_covers_both_sides(rl) -> None:
    run = rl(*words("bench ckpt max-steps=20 orchestrator.batch-size=64"))
    assert (run.trainer.max_steps, run.orchestrator.max_steps, run.trainer.ckpt) == (4, 4, None)
    assert run.trainer.data.fake.batch_size == 64
    in_tokens = words("bench orchestrator.token-batch-size=999 orchestrator.max-inflight-rollouts=8")
    assert rl(*in_tokens).trainer.data.fake.batch_size == 32


def test_lora_reaches_orchestrator_and_server(rl) -> None:
    run = rl(*words("trainer.model.lora.rank=12"))
    lora = run.orchestrator.model.lora
    assert (lora.name, lora.rank, lora.alpha) == ("r12-a32.0", 12, 32.0)
    assert (run.inference.enable_lora, run.inference.max_lora_rank) == (True, 16)


@pytest.mark.parametrize(
    "key",
    [
        "trainer.model.lora.modules_to_save=norm",
        "trainer.model.adapter=outputs/sft",
        "trainer.model.vision.tower_lr=1e-5",
    ],
)
def test_engines_get_whole_weights_in_place_of_adapters_that_they_do_not_take(rl, key: str) -> None:
    with pytest.warns(ConfigWarning, match="so they get whole weights, with it merged in"):
        run = rl(*words(f"trainer.model.lora.rank=12 {key}"))
    assert (run.orchestrator.model.lora, run.inference.enable_lora) == (None, False)
    assert run.orchestrator.await_first_version == ("adapter" in key)


def test_lora_without_a_server_is_warned_about() -> None:
    with pytest.warns(ConfigWarning, match="start the server with LoRA yourself"):
        load_config(RLConfig, [], ["--no-inference", "--trainer.model.lora"])


def test_a_run_needs_no_empty_tables(toml) -> None:
    empty, explicit = (
        load_config(RLConfig, [toml(text)])
        for text in ("max_steps = 3", "max_steps = 3\n[trainer]\n[orchestrator]\n[inference]")
    )
    assert empty == explicit
    assert empty.trainer.max_steps == empty.orchestrator.max_steps == 3


@pytest.mark.parametrize(
    "text",
    [
        '[orchestrator.client]\nbase_url = ["http://host:1/v1"]',
        '[orchestrator.client.elastic]\nhostname = "host"',
        "[deployment]\nnum_infer_gpus = 0",
        'inference = "None"',
    ],
)
def test_a_run_with_other_servers_or_without_gpus_for_one_starts_none(toml, text: str) -> None:
    assert load_config(RLConfig, [toml(text)]).inference is None


def test_servers_under_a_name_and_a_server_of_the_run_exclude_each_other(rl_faults) -> None:
    (fault,) = rl_faults("--orchestrator.client.elastic.hostname", "host", "--inference.server.port", "8000")
    assert "elastic finds servers that the run does not start: remove it, or remove [inference]" in fault


def test_teacher_gpus_start_a_teacher_beside_the_server(rl) -> None:
    run = rl(
        *words("deployment.num-teacher-gpus=2 trainer.loss.teacher-tau=0.5 inference.server.port=9000 model.name=m")
    )
    assert (run.teacher_inference.server.port, run.teacher_inference.parallel.dp) == (9001, 2)
    assert run.orchestrator.teacher_model.client.base_url == ["http://localhost:9001/v1"]
    assert run.orchestrator.teacher_model.model.name == "m"
    own = rl(*words("device=cpu model.name=m inference.model.max-model-len=128 teacher-inference.model.name=big"))
    assert (own.teacher_inference.server.port, own.teacher_inference.model.name) == (8001, "big")
    assert own.teacher_inference.model.max_model_len is None
    copied = rl(*words("deployment.num-teacher-gpus=1 model.name=m inference.model.max-model-len=128 seq-len=128"))
    # A request for the log-probabilities of a prompt generates a token.
    assert copied.teacher_inference.model.max_model_len == 129
    lora = rl(*words("deployment.num-teacher-gpus=1 model.name=m trainer.model.lora.rank=8"))
    assert (lora.inference.enable_lora, lora.teacher_inference.enable_lora) == (True, False)


def test_several_nodes_follow_their_own_rules(rl, rl_faults) -> None:
    nodes = words("deployment.type=multi_node deployment.num-train-nodes=2 deployment.num-infer-nodes=1")
    run = rl(
        *nodes, "--slurm", *words("weight-broadcast.type=nccl deployment.nodes-per-fsdp-group=1 trainer.model.cp=4")
    )
    assert run.orchestrator.num_train_workers == 4
    assert run.trainer.model.dp_replicate == 2
    assert (run.trainer.weight_broadcast.host, run.trainer.weight_broadcast.inference_world_size) == ("0.0.0.0", 8)
    assert "'multi_node' needs [slurm]" in rl_faults(*nodes)[0]
    for teacher in ("--deployment.num-teacher-nodes=1", "--teacher-inference.model.name=x"):
        fault = rl_faults(*nodes, "--slurm", teacher)[0]
        assert "a run on several nodes starts no teacher: start its server yourself" in fault
    (of_a_judge,) = rl_faults(*nodes, "--slurm", "--judge.grader.model=x", "--judge.grader.gpus=1")
    assert "judge.grader is started on one node only" in of_a_judge
    assert of_a_judge.endswith(
        "start its server yourself, such as with `inference` on another node, and set its base_url"
    )
    assert (
        "belongs to deployment.type = 'single_node'" in rl_faults(*nodes, "--slurm", "--deployment.num-train-gpus=1")[0]
    )


def test_toy_models_may_have_different_names(rl) -> None:
    config = rl(*words("trainer.model.name=Jackmin108/a orchestrator.model.name=b"))
    assert (config.trainer.model.name, config.orchestrator.model.name) == ("Jackmin108/a", "b")


def test_components_may_be_instances() -> None:
    trainer = TrainerConfig(optim=MuonConfig(mu=0.5), max_async_level=2)
    run = RLConfig(
        trainer=trainer, orchestrator=OrchestratorConfig(max_async_level=2), max_steps=3, model={"name": "m"}
    )
    assert (run.trainer.optim.mu, run.trainer.max_async_level, run.trainer.max_steps) == (0.5, 2, 3)
    assert run.trainer.tokenizer.name == "m"


def test_a_faulty_shared_value_is_told_once(rl_faults) -> None:
    assert rl_faults("--max-steps=abc", "--log.file=maybe") == [
        "--log.file: should be a valid boolean (got 'maybe')",
        "--max-steps: should be a valid integer (got 'abc')",
    ]


def test_sections_may_be_instances_too() -> None:
    sections = {"model": ModelConfig(seq_len=4096), "optim": MuonConfig(mu=0.5)}
    run = RLConfig(trainer=sections, orchestrator={}, model={"name": "m"})
    assert (run.trainer.model.seq_len, run.trainer.model.name, run.trainer.optim.mu) == (4096, "m", 0.5)


@pytest.mark.parametrize("key", ["trainer.model", "orchestrator.sampling", "inference.parallel", "trainer.ckpt"])
def test_sharing_hides_no_section_that_is_no_table(faults, toml, key: str) -> None:
    component, section = key.split(".")
    others = "\n".join(f"[{name}]" for name in ("trainer", "orchestrator", "inference") if name != component)
    file = toml(f"[model]\nname = 'm'\n[ckpt]\ninterval = 3\n{others}\n[{component}]\n{section} = 3")
    assert faults(RLConfig, files=(file,)) == [f"{file}: {key}: should be a table (got 3)"]


@pytest.mark.parametrize(
    ("options", "keys", "port"),
    [
        ("trainer.metrics-server.port=8000", "inference.server.port and trainer.metrics_server.port", 8000),
        (
            "weight-broadcast.type=nccl weight-broadcast.port=8000 deployment.num-infer-gpus=1",
            "inference.server.port and trainer.weight_broadcast.port",
            8000,
        ),
        (
            "trainer.rollout-transport.type=zmq orchestrator.rollout-transport.type=zmq inference.server.port=5556",
            "inference.server.port and trainer.rollout_transport.port + 1",
            5556,
        ),
        (
            "deployment.num-teacher-gpus=1 trainer.loss.teacher-tau=0.5 trainer.metrics-server.port=8001",
            "teacher_inference.server.port and trainer.metrics_server.port",
            8001,
        ),
    ],
)
def test_no_two_processes_of_a_run_share_a_port(faults, options: str, keys: str, port: int) -> None:
    assert faults(RLConfig, *RL, *words(options)) == [f"command line: {keys} are both {port}: change one"]


def test_a_metrics_server_gets_a_port_of_its_own(rl) -> None:
    assert rl("--trainer.metrics-server").trainer.metrics_server.port == 8002
    assert rl("--orchestrator.metrics-server").orchestrator.metrics_server.port == 8003
    assert rl(*words("trainer.metrics-server.host=h inference.server.port=9000")).trainer.metrics_server.port == 9002


def test_evaluation_samples_as_training_where_it_does_not_say(rl) -> None:
    sampling = "orchestrator.sampling.max-tokens=64 orchestrator.sampling.repetition-penalty=1.1"
    thinking = ("--orchestrator.sampling.extra-body", '{"chat_template_kwargs": {"enable_thinking": false}}')
    shared = rl(*words(f"{sampling} orchestrator.eval.interval=5"), *thinking).orchestrator.eval.sampling
    assert (shared.max_tokens, shared.repetition_penalty, shared.temperature) == (64, 1.1, None)
    assert shared.extra_body == {"chat_template_kwargs": {"enable_thinking": False}}
    own = rl(*words(f"{sampling} orchestrator.eval.sampling.max-tokens=9")).orchestrator.eval.sampling
    assert (own.max_tokens, own.repetition_penalty) == (9, 1.1)


def test_evaluation_does_not_take_over_the_defaults_of_training(rl) -> None:
    sampling = rl(*words("orchestrator.eval.interval=5")).orchestrator.eval.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.repetition_penalty) == (None, None, None)


def test_the_sampling_of_an_evaluation_survives_a_resolved_file(rl, toml) -> None:
    given = rl(*words("orchestrator.sampling.max-tokens=64 orchestrator.eval.interval=5")).orchestrator
    assert load_config(OrchestratorConfig, [toml(to_toml(given))]) == given
