"""The rules of one component: what is refused, what is derived."""

from __future__ import annotations

import warnings

import pytest

from prime_rl.configs.inference import InferenceConfig, ParallelConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigWarning, dump_toml, load_config


def orchestrator(*options: str) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, [], options)


def trainer(*options: str) -> TrainerConfig:
    return load_config(TrainerConfig, [], options)


def sft(*options: str) -> SFTConfig:
    return load_config(SFTConfig, [], options)


def words(options: str) -> list[str]:
    return [f"--{option}" for option in options.split()]


IMITATED = "demonstrations.data.name=rows.jsonl"


@pytest.mark.parametrize(
    ("config_cls", "options", "fault"),
    [
        (InferenceConfig, "max-lora-rank=513", "max_lora_rank (513) is above 512"),
        (
            OrchestratorConfig,
            "buffer.easy-threshold=0.2 buffer.hard-threshold=0.2",
            "easy_threshold (0.2) must be above",
        ),
        (SFTConfig, "early-stop.patience=2", "early_stop.patience and early_stop.target need [val]"),
        (SFTConfig, "early-stop.min-entropy=0.1", "early_stop.min_entropy is a rule for RL: set patience or target"),
        (SFTConfig, "early-stop.min-delta=0.1", "has no rule: set patience, target, min_entropy"),
        (
            OrchestratorConfig,
            "eval.metric=eval/other/avg@1",
            "'eval/other/avg@1' is of none of the environments; there is",
        ),
        (OrchestratorConfig, "eval.metric=eval/reverse-text/avg@2", "no evaluation makes 'eval/reverse-text/avg@2'"),
        (
            OrchestratorConfig,
            "eval.metric=eval/reverse-text/pass@2",
            "there is eval/reverse-text/avg@1, eval/reverse-text/pass@1",
        ),
        (OrchestratorConfig, "buffer.env-ratios=0", "buffer.env_ratios.0: should be a finite number above 0"),
        (OrchestratorConfig, "buffer.env-ratios=1,2", "buffer.env_ratios has 2 entries for 1 environments"),
        (OrchestratorConfig, "buffer.skip-verification buffer.hard-threshold=0", "hard_threshold need them"),
        (
            OrchestratorConfig,
            "buffer.skip-verification buffer.online-difficulty-filtering",
            "online_difficulty_filtering",
        ),
        (
            OrchestratorConfig,
            'filters=[{"type":"gibberish"},{"type":"gibberish"}]',
            "filters has a type more than once",
        ),
        (OrchestratorConfig, "buffer.drop-equal-rewards", "buffer.drop_equal_rewards drops every group of one rollout"),
        (OrchestratorConfig, "max-concurrent=3 rollouts-per-example=4", "max_concurrent (3) is below"),
        (OrchestratorConfig, "weight-broadcast.type=nccl max-async-level=2", "needs max_async_level = 1 (got 2)"),
        (TrainerConfig, "offload-while-sampling", "offload_while_sampling needs max_async_level = 0 (got 1)"),
        (OrchestratorConfig, "servers-sleep", "inference.enable_sleep_mode needs max_async_level = 0"),
        (OrchestratorConfig, "batch-size=8 token-batch-size=8 max-inflight-rollouts=8", "exclude each other"),
        (OrchestratorConfig, "token-batch-size=8", "token_batch_size needs max_inflight_rollouts"),
        (OrchestratorConfig, "token-batch-size=8 max-inflight-rollouts=8 bound-lag=true", "bound_lag needs batch_size"),
        (
            OrchestratorConfig,
            "token-batch-size=8 max-inflight-rollouts=8 oversampling-factor=2",
            "oversampling_factor needs",
        ),
        (
            OrchestratorConfig,
            "rollouts-per-example=3",
            "batch_size (128) is not a multiple of rollouts_per_example (3)",
        ),
        (OrchestratorConfig, "batch-size=8 oversampling-factor=2 max-inflight-rollouts=9", "(8 * 2.0 = 16)"),
        (OrchestratorConfig, "token-batch-size=8 max-inflight-rollouts=2 rollouts-per-example=4", "(2) is below"),
        (OrchestratorConfig, "batch-size=8 max-inflight-rollouts=2 rollouts-per-example=4", "(2) is below"),
        (
            OrchestratorConfig,
            'max-steps=1 sampling.temperature=1 sampling.temp-scheduler={"start_temperature":1,"end_temperature":1}',
            "sampling.temperature and",
        ),
        (OrchestratorConfig, 'sampling.temp-scheduler={"start_temperature":1,"end_temperature":1}', "or max_steps"),
        (OrchestratorConfig, 'env=[{"id":"a"},{"id":"a"}]', "env: more than one environment is called 'a': set `name`"),
        (
            OrchestratorConfig,
            'eval.env=[{"id":"a"},{"id":"b","name":"a"}]',
            "eval.env: more than one environment is called 'a'",
        ),
        (OrchestratorConfig, "client.base-url=[]", "base_url is empty: name a server"),
        (OrchestratorConfig, "client.base-url=localhost:8000", "is not a URL: write http://host:port/v1"),
        (OrchestratorConfig, "advantage.type=custom advantage.import-path=mine", "write module:function"),
        (TrainerConfig, "loss.type=custom loss.import-path=mine/loss.py:loss", "is not the path of a function"),
        (TrainerConfig, "scheduler.type=linear", "scheduler.decay_steps = 10 needs max_steps"),
        (TrainerConfig, "scheduler.type=linear max-steps=19", "do not fit into max_steps = 19"),
        (
            TrainerConfig,
            "scheduler.type=linear scheduler.warmup-steps=0 scheduler.decay-steps=0",
            "the linear schedule needs scheduler.warmup_steps or scheduler.decay_steps above 0",
        ),
        (TrainerConfig, "scheduler.type=cosine max-steps=10", "max_steps above scheduler.warmup_steps = 10"),
        (TrainerConfig, "scheduler.type=cosine", "(got max_steps = None)"),
        (TrainerConfig, "ckpt.resume-step=6 max-steps=5", "ckpt.resume_step = 6 is beyond max_steps = 5"),
        (TrainerConfig, "memory-profiler-path=x device=cpu", "records a GPU's memory"),
        (TrainerConfig, "model.lora.target-modules=(q_proj", '"(q_proj" is not a regular expression'),
        (TrainerConfig, "model.lora.target-modules=[]", "name at least one module to adapt"),
        (TrainerConfig, "model.trust-remote-code model.impl=custom", "trust_remote_code runs the model's own"),
        (TrainerConfig, "model.cp=2 model.compile", "cp (2) with [compile]"),
        (TrainerConfig, "model.tp=2 model.compile", "tp (2) with [compile]"),
        (
            TrainerConfig,
            "model.quantization.type=nf4",
            "quantization stores weights that are not trained: set [model.lora]",
        ),
        (TrainerConfig, "optim.stochastic-rounding", "set model.optimization_dtype = 'bfloat16'"),
        (TrainerConfig, "model.lora.init=loftq", "lora.init = 'loftq' makes up for quantization"),
        (TrainerConfig, "model.lora.init=pissa model.lora.use-dora", "init = 'pissa' with use_dora"),
        (
            TrainerConfig,
            "model.lora.init=pissa model.quantization.type=nf4",
            "lora.init = 'pissa' needs the weights as numbers: set lora.init = 'loftq'",
        ),
        (TrainerConfig, "model.quantization.type=nf4 model.lora model.tp=2", "does not go with tp (2)"),
        (
            TrainerConfig,
            "model.quantization.type=nf4 model.lora model.compile",
            "quantization does not work with [compile]",
        ),
        (TrainerConfig, "model.ac.freq=2 model.ac.memory-gib=4", "ac.freq (2) with ac.memory_gib"),
        (TrainerConfig, "model.ac.memory-gib=4 model.ac-offloading", "ac_offloading moves what ac.memory_gib keeps"),
        (TrainerConfig, "model.ep=2 model.ac.memory-gib=4", "ep (2) with ac.memory_gib"),
        (TrainerConfig, "model.tp=2 model.ac-offloading", "tp (2) with [ac_offloading]"),
        (TrainerConfig, "model.mlp-chunk-tokens=64 model.compile", "mlp_chunk_tokens (64) with [compile]"),
        (TrainerConfig, "model.ep=2 model.ac-offloading", "ep (2) with [ac_offloading]"),
        (TrainerConfig, "model.cp=2 distillation.top-k=4", "model.cp (2) divides them"),
        (TrainerConfig, "model.tp=2 distillation.top-k=4", "model.tp (2) divides them"),
        (TrainerConfig, "demonstrations.weight=1", "data.name is not set: name the rows to imitate"),
        (TrainerConfig, f"{IMITATED} demonstrations.final-weight=1", "final_weight (1) needs anneal_steps"),
        (
            TrainerConfig,
            f"{IMITATED} demonstrations.weight=2 demonstrations.combine=share",
            "weights of at most 1 (got 2)",
        ),
        (TrainerConfig, f"{IMITATED} demonstrations.weight=0", "weight = 0 trains on no row"),
        (TrainerConfig, f"{IMITATED} demonstrations.data.seq-len=4096", "is above trainer.model.seq_len (2048)"),
        (
            TrainerConfig,
            f"{IMITATED} model.seq-len=100 demonstrations.data.pack-function=stack",
            "needs a trainer.demonstrations.data.seq_len in steps of 256 (got 100)",
        ),
        (TrainerConfig, "critic.gamma=1 loss.sft-coef=1", "loss.sft_coef tells good rollouts by their advantage"),
        (TrainerConfig, "critic.gamma=1 loss.adv-tau=0", "loss.adv_tau = 0 leaves out the advantages of [critic]"),
        (
            TrainerConfig,
            "critic.scheduler.type=cosine max-steps=9",
            "[critic]: the cosine schedule needs max_steps above",
        ),
        (
            TrainerConfig,
            "critic.warmup-steps=5 max-steps=20 scheduler.type=linear",
            "do not fit into max_steps = 15: the first critic.warmup_steps = 5 steps do not train the policy",
        ),
        (TrainerConfig, "critic.optim.type=muon model.fsdp-cpu-offload", "[critic]: optim.type = 'muon' does not work"),
        (
            TrainerConfig,
            "critic.scheduler.type=cosine critic.scheduler.min-lr=1 max-steps=20",
            "[critic]: scheduler.min_lr = 1 is above optim.lr",
        ),
        (TrainerConfig, "model.fsdp-cpu-offload model.optim-cpu-offload", "remove optim_cpu_offload"),
        (TrainerConfig, "model.attn=fa4", "attn = 'fa4' needs impl = 'custom'"),
        (TrainerConfig, "model.ep=2 model.compile", "ep (2) with [compile]"),
        (TrainerConfig, "model.ep=3 model.tp=2", "ep (3) is not a multiple of tp (2)"),
        (TrainerConfig, "loss.sequence-mask-low=100", "sequence_mask_low (100.0) must be below"),
        (TrainerConfig, "trace-path=x", "trace_path needs max_steps of at most 9 (got None)"),
        (TrainerConfig, "trace-path=x max-steps=10", "(got 10)"),
        (TrainerConfig, "ckpt.weights.save-adapter-separately", "save_adapter_separately needs model.lora"),
        (TrainerConfig, "weight-broadcast.type=nccl max-async-level=2", "needs max_async_level = 1 (got 2)"),
        (TrainerConfig, "weight-broadcast.type=nccl model.lora", "cannot send model.lora"),
        (TrainerConfig, "optim.type=muon model.fsdp-cpu-offload", "'muon' does not work with"),
        (TrainerConfig, "model.optim-cpu-offload max-concurrent-runs=2", "serves one run"),
        (SFTConfig, "data.batch-size=7 data.micro-batch-size=2", "batch_size (7) is not a multiple"),
        (SFTConfig, "data.batch-size=2 data.micro-batch-size=4", "batch_size (2) is not a multiple"),
        (SFTConfig, "data.batch-size=6 deployment.num-gpus=4", "data.batch_size = 6 is not a multiple of 4 processes"),
        (SFTConfig, "model.dp-replicate=2", "does not divide the 1 trainer processes (deployment.num_gpus = 1)"),
        (SFTConfig, "scheduler.type=linear max-steps=19", "do not fit into max_steps = 19"),
        (
            SFTConfig,
            "scheduler.type=linear max-steps=30 ckpt.resume-step=15 ckpt.skip-scheduler",
            "do not fit into max_steps = 15",
        ),
        (SFTConfig, "ckpt.resume-step=6 max-steps=5", "nothing is left to train"),
        (SFTConfig, "data.splits=a,b data.probabilities=0.7,0.8", "probabilities must be at least 0 and add up to 1"),
        (SFTConfig, "data.subsets=a data.splits=b,c", "subsets has 1 entries and splits 2"),
        (SFTConfig, "data.subsets=a data.probabilities=0.7,0.8", "probabilities has 2 entries and subsets 1"),
        (SFTConfig, "data.splits=a data.probabilities=0.7,0.8", "probabilities has 2 entries and splits 1"),
        (SFTConfig, "deployment.num-gpus=9", "num_gpus (9) is above gpus_per_node (8)"),
        (SFTConfig, "deployment.type=multi_node", "'multi_node' needs [slurm]"),
        (SFTConfig, "deployment.type=multi_node slurm deployment.nodes-per-fsdp-group=3", "(2) is not a multiple of"),
        (SFTConfig, "model.cp=2", "model.cp = 2 does not divide the 1 trainer processes (deployment.num_gpus = 1)"),
        (
            SFTConfig,
            "model.cp=2 model.dp-replicate=2 deployment.num-gpus=6",
            "model.dp_replicate = 2 x model.cp = 2 does not divide the 6 trainer processes",
        ),
        (SFTConfig, "model.cp=2 data.batch-size=3 deployment.num-gpus=4", "2 groups of model.cp = 2 processes"),
        (
            SFTConfig,
            "model.cp=2 model.tp=2 data.batch-size=3 deployment.num-gpus=8",
            "2 groups of model.cp = 2 x model.tp = 2 processes",
        ),
        (SFTConfig, "model.seq-len=64 data.seq-len=32", "model.seq_len (64) and data.seq_len (32) differ"),
        (SFTConfig, "data.pack-function=stack data.seq-len=128", "needs a data.seq_len in steps of 256 (got 128)"),
        (SFTConfig, "model.fused-lm-head-chunk-size=8192", "must be 'auto' or 'disabled'"),
        (SFTConfig, "trace-path=x", "trace_path needs max_steps"),
        (SFTConfig, "model.ep=4 deployment.num-gpus=2", "model.ep = 4 does not divide the 2 trainer processes"),
    ],
)
def test_a_broken_rule_is_one_fault(faults, config_cls: type, options: str, fault: str) -> None:
    found = faults(config_cls, *words(options))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize("config_cls", [TrainerConfig, SFTConfig])
def test_a_benchmark_has_too_few_steps_for_a_schedule_and_keeps_its_rate(config_cls: type) -> None:
    config = load_config(config_cls, [], words("bench scheduler.type=linear max-steps=1000"))
    assert (config.max_steps, config.scheduler.type) == (4, "constant")


def test_a_benchmark_has_no_warm_up_of_a_critic() -> None:
    given = "bench critic.scheduler.type=cosine critic.warmup-steps=20 critic.optim.lr=1e-3"
    critic = load_config(TrainerConfig, [], words(given)).critic
    assert (critic.scheduler.type, critic.warmup_steps, critic.optim.lr) == ("constant", 0, 1e-3)


def test_a_run_that_forgets_its_progress_may_start_from_any_step() -> None:
    assert sft("--ckpt.resume-step=6", "--ckpt.skip-progress", "--max-steps=5").max_steps == 5


@pytest.mark.parametrize(("asked", "given"), [(1, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_a_lora_rank_is_raised_to_one_that_vllm_knows(asked: int, given: int) -> None:
    assert InferenceConfig(max_lora_rank=asked).max_lora_rank == given


def test_api_servers_follow_dp_and_lora_allows_one() -> None:
    assert InferenceConfig(parallel={"dp": 3}).api_server_count == 3
    assert InferenceConfig(parallel={"dp": 3}, api_server_count=5).api_server_count == 5
    assert InferenceConfig(parallel={"dp": 3}, enable_lora=True, api_server_count=5).api_server_count == 1


def test_parallel_sizes_read_as_text() -> None:
    assert str(ParallelConfig(tp=2, dp=3)) == "tp=2 dp=3"


def test_vllm_gets_its_own_names() -> None:
    options = words("server.port=9 model.name=m model.max-model-len=64 parallel.tp=2 parallel.dp=3 seed=5")
    given = vars(load_config(InferenceConfig, [], options).to_vllm())
    expected = {
        "host": "127.0.0.1",
        "port": 9,
        "model": "m",
        "max_model_len": 64,
        "dtype": "auto",
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "api_server_count": 3,
        "seed": 5,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": None,
    }
    assert {key: given[key] for key in expected} == expected
    assert not {"reasoning_parser", "rope_scaling", "device", "backend", "server", "parallel"} & set(given)
    scaled = InferenceConfig(model={"rope_scaling": {"factor": 2}, "reasoning_parser": "r"}).to_vllm()
    assert (scaled.rope_scaling, scaled.reasoning_parser) == ({"factor": 2}, "r")


def test_a_batch_is_128_rollouts_and_all_of_them_are_in_flight() -> None:
    config = orchestrator()
    assert (config.batch_size, config.max_inflight_rollouts, config.sampling.temperature) == (128, 128, 1.0)


def test_oversampling_is_cut_to_a_whole_number() -> None:
    assert orchestrator("--batch-size=10", "--oversampling-factor=1.55").max_inflight_rollouts == 15


def test_token_batches_have_no_batch_size() -> None:
    config = orchestrator("--token-batch-size=99", "--max-inflight-rollouts=8")
    assert (config.batch_size, config.max_inflight_rollouts) == (None, 8)


def test_environments_are_told_the_sequence_length_and_whether_to_score() -> None:
    env = '{"id": "x", "extra_env_kwargs": {"seq_len": 1, "mine": 2}}'
    config = orchestrator("--env", env, "--seq-len=64", "--buffer.skip-verification", "--eval")
    assert config.env[0].extra_env_kwargs == {"seq_len": 64, "mine": 2, "score_rollouts": False}
    assert config.eval.env[0].extra_env_kwargs == {}


def test_a_temperature_schedule_takes_the_place_of_the_constant() -> None:
    schedule = '{"start_temperature": 1, "end_temperature": 0.5}'
    assert orchestrator("--sampling.temp-scheduler", schedule, "--max-steps=5").sampling.temperature is None


def test_an_orchestrator_benchmark_is_short_and_waits_for_nobody() -> None:
    config = orchestrator("--bench", "--eval", "--wandb", "--prime-monitor", "--weight-broadcast.type=nccl")
    assert (config.max_steps, config.max_async_level, config.eval) == (4, 1_000_000_000, None)
    assert (config.wandb.log_extras, config.prime_monitor.log_extras) == (None, None)


def test_a_trainer_benchmark_is_short_and_saves_nothing() -> None:
    config = trainer("--bench", "--ckpt", "--max-steps=99", "--trace-path=x")
    assert (config.max_steps, config.ckpt, config.data.fake.batch_size) == (4, None, 2)


def test_an_sft_benchmark_keeps_its_data() -> None:
    config = sft("--bench", "--ckpt", "--trace-path=x")
    assert (config.max_steps, config.ckpt, config.data.type) == (4, None, "sft")


@pytest.mark.parametrize("load", [trainer, sft])
def test_a_tokenizer_is_the_model_s_unless_named(load) -> None:
    config = load("--model.name=m", "--model.trust-remote-code")
    assert (config.tokenizer.name, config.tokenizer.trust_remote_code) == ("m", True)
    named = load("--model.name=m", "--tokenizer.name=t", "--tokenizer.trust-remote-code=false")
    assert (named.tokenizer.name, named.tokenizer.trust_remote_code) == ("t", False)


def test_the_fused_output_layer_is_resolved() -> None:
    assert trainer().model.fused_lm_head_chunk_size == 8192
    assert trainer("--model.fused-lm-head-chunk-size=disabled").model.fused_lm_head_chunk_size == "disabled"
    assert sft().model.fused_lm_head_chunk_size == "disabled"


def test_a_small_chunk_of_the_output_layer_is_warned_about() -> None:
    with pytest.warns(ConfigWarning, match="fused_lm_head_chunk_size = 512 is slow"):
        trainer("--model.fused-lm-head-chunk-size=512")


def test_dropout_of_adapters_has_no_effect_in_rl_and_is_warned_about() -> None:
    with pytest.warns(ConfigWarning, match=r"model\.lora\.dropout = 0\.1 has no effect: RL trains without dropout"):
        trainer("--model.lora.dropout=0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sft("--model.lora.dropout=0.1").model.lora.dropout == 0.1


def test_offloading_activations_switches_checkpointing_on() -> None:
    assert trainer("--model.ac-offloading").model.ac.freq == 1


def test_several_nodes_tolerate_a_stray_gpu_count_and_make_copies_of_the_model() -> None:
    options = words("deployment.type=multi_node deployment.num-nodes=4 deployment.nodes-per-fsdp-group=2 slurm")
    config = sft(*options, "--deployment.num-gpus=8")
    assert config.model.dp_replicate == 2


def test_sections_made_by_default_are_not_shared() -> None:
    assert TrainerConfig().model is not TrainerConfig().model
    assert OrchestratorConfig().env[0] is not OrchestratorConfig().env[0]


def test_the_data_given_stays_as_it_was() -> None:
    data = {"optim": {"lr": 1.0}, "ckpt": "None"}
    TrainerConfig(**data)
    assert data == {"optim": {"lr": 1.0}, "ckpt": "None"}


def test_a_filter_that_may_drop_every_rollout_is_told() -> None:
    filtering = {"buffer": {"online_difficulty_filtering": True}}
    with pytest.warns(ConfigWarning, match=r"rollouts_per_example is 1, and .* drops every rollout with reward 0 or 1"):
        OrchestratorConfig.model_validate(filtering)
    with warnings.catch_warnings(action="error"):
        OrchestratorConfig.model_validate(filtering | {"rollouts_per_example": 2})


def test_loading_warns_of_nothing_without_a_reason() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for load in (trainer, sft, orchestrator):
            load()
    assert caught == []


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_a_gradient_norm_of_0_which_turns_clipping_off_elsewhere_is_a_warning(kind: str) -> None:
    for load in (trainer, sft):
        with pytest.warns(ConfigWarning, match=r"optim\.max_norm = 0 makes every gradient 0"):
            load(f"--optim.type={kind}", "--optim.max-norm=0")


def test_sft_takes_its_sequence_length_under_either_name() -> None:
    for options in (["--model.seq-len=64"], ["--data.seq-len=64"], ["--model.seq-len=64", "--data.seq-len=64"]):
        config = sft(*options)
        assert (config.model.seq_len, config.data.seq_len) == (64, 64)
        assert unbuilt_faults(config) == []


def test_sft_validates_with_the_same_sequence_length() -> None:
    assert sft("--model.seq-len=64", "--val").val.data.seq_len == 64
    assert sft("--model.seq-len=64", "--val.data.seq-len=32").val.data.seq_len == 32


def test_an_unknown_key_of_data_is_told_once_with_validation(toml, faults) -> None:
    file = toml("[data]\nnmae = 'x'\n[val]\ninterval = 5")
    assert faults(SFTConfig, files=(file,)) == [f"{file}: data.nmae: unknown key; did you mean data.name?"]


def test_a_resolved_sft_config_loads_again(tmp_path) -> None:
    config = sft("--model.seq-len=64", "--val")
    dump_toml(config, tmp_path / "sft.toml")
    assert load_config(SFTConfig, [tmp_path / "sft.toml"]) == config
