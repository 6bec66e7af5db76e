from __future__ import annotations

import re

import pytest

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.errors import EnvironmentFault, MalformedRollout
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, to_samples
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.utils.images import ImageLimits
from prime_rl.utils.logger import setup_logger

pytestmark = pytest.mark.usefixtures("importable_environments")
ARGS = train_sampling_args(SamplingConfig(), 0.7)
LOG = LogConfig(vf_level="warning")
EXAMPLE = ExampleRef("letters-env", 1)


def load(**config):
    (environment,) = load_environments([EnvConfig(id="letters-env", **config)], LOG).values()
    return environment


async def run_group(environment, server, size: int = 2, version: int = 5):
    pool = InferencePool(ClientConfig(base_url=[server.url]), "letters")
    await pool.wait_ready(use_token_client=True)
    try:
        return await environment.run_group(EXAMPLE, size, pool.servers[0], ARGS, version)
    finally:
        await pool.close()


async def test_a_group_comes_back_scored_with_tokens_and_the_version_that_made_them(policy_server) -> None:
    policy_server.version = 1
    rollouts = await run_group(load(), policy_server)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    (turn,) = rollouts[0].trace.calls
    assert bytes(turn.completion_ids[:-1]) == b"olleh"
    assert turn.inference_logprobs == [-1.5] * 6
    assert (rollouts[0].version, rollouts[0].temperature) == (1, 0.7)
    assert rollouts[0].metrics == {"reversed_text": 1.0, "num_turns": 1.0}
    assert rollouts[0].stop_condition == "max_turns_reached"


@pytest.mark.parametrize("way", ["in place", "in new ones"])
async def test_a_rollout_has_the_temperature_at_which_its_environment_had_it_sampled(policy_server, way: str) -> None:
    rollouts = await run_group(load(args={"kind": "cooler", "way": way}), policy_server)
    assert [request["temperature"] for request in policy_server.requests[1:]] == [0.25, 0.25]
    assert [rollout.temperature for rollout in rollouts] == [0.25, 0.25]
    assert ARGS["temperature"] == 0.7  # other groups are not concerned


async def test_a_temperature_that_is_no_number_fails_the_group(policy_server) -> None:
    with pytest.raises(MalformedRollout, match="gave a malformed rollout"):
        await run_group(load(args={"kind": "cooler", "way": "warm"}), policy_server)


async def test_where_servers_do_not_tell_the_version_is_that_of_the_submission(policy_server) -> None:
    policy_server.drops = ("weight_versions",)
    rollouts = await run_group(load(), policy_server)
    assert {rollout.version for rollout in rollouts} == {5}


async def test_a_conversation_of_two_turns_is_one_sample(policy_server) -> None:
    policy_server.version = 1
    (rollout,) = await run_group(load(args={"kind": "twice"}), policy_server, size=1)
    assert rollout.num_turns == 2
    assert policy_server.requests[-1]["path"] == "/v1/chat/completions/tokens"
    (sample,) = to_samples(rollout)
    assert bytes(sample.prompt_ids) == b"user:hello\x03assistant:"
    assert bytes(sample.completion_ids) == b"olleh\x03user:again\x03assistant:niaga\x03"
    trained = [token for token, mask in zip(sample.completion_ids, sample.completion_mask, strict=True) if mask]
    assert bytes(trained) == b"olleh\x03niaga\x03"


async def test_a_conversation_that_began_before_the_first_adapter_goes_on_with_the_base_model(policy_server) -> None:
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters", adapter="r4-a8.0")
    environment = load(args={"kind": "twice"})

    def reply(messages, version) -> str:
        if len(messages) == 1:
            policy_server.adapters["r4-a8.0"] = 1
            pool.servers[0].model = "r4-a8.0"
        return "ok"

    policy_server.reply = reply
    (rollout,) = await environment.run_group(EXAMPLE, 1, pool.servers[0], ARGS, 0)
    assert [request["model"] for request in policy_server.requests] == ["letters", "letters"]
    assert rollout.version == 0
    await pool.close()


async def test_what_exceeds_seq_len_is_cut_and_flagged(policy_server) -> None:
    environment = load(extra_env_kwargs={"seq_len": 23, "score_rollouts": True})
    (rollout,) = await run_group(environment, policy_server, size=1)
    assert rollout.is_truncated
    assert rollout.trace.calls[0].total_tokens == 23


async def test_without_verification_rewards_are_zero(policy_server) -> None:
    policy_server.version = 1
    (rollout,) = await run_group(load(extra_env_kwargs={"score_rollouts": False}), policy_server, size=1)
    assert rollout.reward == 0.0


async def test_an_image_that_the_environment_shows_later_is_refused_by_name(policy_server) -> None:
    policy_server.reply = lambda messages, version: "ok"
    with pytest.raises(EnvironmentFault, match="environment 'letters-env' shows the model images"):
        await run_group(load(args={"kind": "screenshots"}), policy_server, size=1)


def test_an_image_in_a_prompt_is_refused_with_its_row() -> None:
    with pytest.raises(
        EnvironmentFault, match="'letters-env': the prompt of row 1 has an image, and the model reads text alone"
    ):
        load(args={"kind": "images"}).check_images()
    load(args={"kind": "parts"}).check_images()
    load().check_images()
    seeing = load(args={"kind": "images"})
    seeing.image_limits = ImageLimits()
    with pytest.raises(EnvironmentFault, match="the prompt of row 1: the image's data URL: it is empty"):
        seeing.check_images()


async def test_a_group_whose_every_request_failed_is_a_failure_not_a_score(policy_server) -> None:
    environment = load()
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    policy_server.refusal = (422, "no such sampler")
    with pytest.raises(MalformedRollout, match=r"every rollout of the group failed: .*no such sampler"):
        await environment.run_group(EXAMPLE, 2, pool.servers[0], ARGS, 0)
    await pool.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "no-such-env"}, r"env\[0\]: environment 'no-such-env' does not import: No module named 'no_such_env'"),
        ({"id": "no-such-env"}, "No module named 'no_such_env'; install its package with .* or correct `id`"),
        ({"id": "broken-env"}, r"'broken-env' does not import: No module named 'a_module_that_is_not_there'"),
        ({"id": "broken-env"}, "; its code imports that module: add the package that has it to `dependencies`"),
        (
            {"id": "letters-env", "args": {"kind": "odd"}},
            "Failed to load environment 'letters-env': .*no such kind: odd",
        ),
        (
            {"id": "letters-env", "args": {"kind": "odd arguments"}},
            r"reward function '<lambda>' requires 'answr' \(did you mean 'answer'\?\), and gets only prompt, ",
        ),
        (
            {"id": "letters-env", "args": {"kind": "odd group arguments"}},
            r"requires 'answer' \(did you mean 'answers'\?\), and gets only prompts, completions, answers, states",
        ),
        (
            {"id": "letters-env", "args": {"kind": "forgotten return"}},
            r"'letters-env' does not load: load_environment returned None, not an environment of verifiers",
        ),
        ({"id": "letters-env", "args": {"kind": "class"}}, "load_environment returned the class SingleTurnEnv, not an"),
        ({"id": "letters-env", "args": {"kind": "unawaited"}}, "load_environment is an `async def`.*: write `def`"),
        (
            {"id": "letters-env", "args": {"kind": "list"}},
            r"'letters-env' does not load: its dataset is a value of type list, .*: Dataset.from_list\(rows\) makes",
        ),
        (
            {"id": "letters-env", "args": {"kind": "late list"}},
            r"cannot build the dataset of environment 'letters-env': its dataset is a value of type list",
        ),
        (
            {"id": "letters-env", "args": {"kind": "odd weight"}},
            "environment 'letters-env': the weight of reward function 'reversed_text' is nan, not a finite number",
        ),
        ({"id": "letters-env", "args": {"size": 1}}, "unexpected keyword argument 'size'"),
        ({"id": "letters-env", "args": {"rows": 0}}, "'letters-env' has no training rows"),
        ({"id": "letters-env", "args": {"kind": "eval only"}}, "cannot build the dataset of environment 'letters-env'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(config, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message) as fault:
        load_environments([EnvConfig(**config)], LOG)
    assert "\n" not in str(fault.value)


def test_a_reward_function_may_ask_for_columns_objects_and_anything_else() -> None:
    assert load_environments([EnvConfig(id="letters-env", args={"kind": "many arguments"})], LOG)


def test_a_reward_function_that_never_gets_an_answer_is_told(capsys) -> None:
    setup_logger("info")
    load_environments([EnvConfig(id="letters-env", args={"kind": "no answers"})], LOG)
    logged = capsys.readouterr().out
    assert "env[0]: environment 'letters-env': reversed_text requires `answer`, and the rows have no such" in logged
    assert re.search(r"it is always empty; the columns are .*\breply\b", logged)


def test_a_version_in_the_id_is_left_out_of_the_import() -> None:
    environments = load_environments([EnvConfig(id="letters-env@0.1.2", args={"rows": 3})], LOG)
    assert {name: len(environment) for name, environment in environments.items()} == {"letters-env@0.1.2": 3}


def test_an_environment_may_be_used_twice_under_two_names() -> None:
    environments = [EnvConfig(id="letters-env"), EnvConfig(id="letters-env", name="other")]
    assert len(load_environments(environments, LOG)) == 2
