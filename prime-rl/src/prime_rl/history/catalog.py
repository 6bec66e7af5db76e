"""Meaning and unit of each name in `OUT/metrics.jsonl`. Generates the reference of metrics.

`python -m prime_rl.history.catalog > docs/metrics.md`
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the reference."""

    names: str
    """A name; `{a,b}` stands for several, `<word>` for a part that the environment or config chooses."""
    unit: str
    meaning: str

    def covers(self, name: str) -> bool:
        return any(re.fullmatch(_pattern(each), name) for each in expanded(self.names))


_STATISTICS = "/{mean,median,std,min,max}"
_RANGE = "/{mean,max,min}"

# fmt: off
_SPEED = (
    Metric("perf/throughput", "tokens/s", "trained and other tokens over the last ten steps, all processes; not in the first step"),
    Metric("perf/throughput_per_gpu", "tokens/s", "the same, divided by the number of processes"),
    Metric("perf/mfu", "%", "share of the device's peak FLOP/s that training reaches; only where the peak is known"),
    Metric("perf/peak_memory", "GiB", "highest memory of the main process so far: reserved on its GPU, or resident on a CPU"),
    Metric("optim/lr", "", "learning rate of the step's updates"),
    Metric("optim/grad_norm", "", "norm of the gradient before clipping; with minibatches, the mean over the step's updates"),
    Metric("experts/max_load/{mean,max}", "at least 1", "mixtures of experts: tokens of a layer's busiest expert / mean of the layer's experts; mean and largest of the layers, of the step's last update. No token is dropped"),
    Metric("experts/unused", "0 to 1", "share of experts without a token"),
    Metric("experts/aux_loss", "at least about k", "with `model.router_aux_loss_coef`: the load-balancing loss before its weight, mean over rows; k experts per token is balanced"),
    Metric("experts/router_entropy", "nats", "entropy of the softmax of a router's scores; mean over tokens and layers"),
    Metric("time/step", "s", "from the end of the previous step to the end of this one"),
    Metric("time/forward_backward", "s", "forward, backward and optimizer of the step"),
    Metric("time/save_ckpt", "s", "saving a checkpoint"),
)

SFT = (
    Metric("loss/mean", "nats/token", "cross-entropy of the step's trained tokens, over all processes, weighted with `loss = \"dft\"` and `\"phi\"`; with `[distillation]`, the sum of its terms; of `dpo` and `rm`, the loss of a pair or answer"),
    Metric("teacher_divergence/mean", "nats/token", "`sft` with `[distillation]`: divergence from the teacher's distribution, without `weight`"),
    Metric("sft_loss/mean", "nats/token", "`sft` with `[distillation]` and its `sft_coef`: cross-entropy of the data's tokens"),
    Metric("val/loss", "nats/token", "the same of the validation rows, without weights"),
    Metric("val/perplexity", "", "its exponential; not of `dpo` and `rm`"),
    Metric("{,val/}rewards/{chosen,rejected}", "", "`dpo`: what the loss compares, such as beta * (log-probability - that of the reference); mean over the step's pairs, or over its good and its bad answers"),
    Metric("{,val/}rewards/margins", "", "`dpo`: chosen minus rejected reward"),
    Metric("{,val/}rewards/accuracies", "0 to 1", "`dpo`: share of pairs whose chosen reward is higher"),
    Metric("{,val/}kl", "nats", "`dpo` with KTO: its estimate of the KL from the reference, at least 0"),
    Metric("{,val/}logps/{chosen,rejected}", "nats", "`dpo`: log-probability of an answer, summed over its tokens"),
    Metric("{,val/}accuracy", "0 to 1", "`rm`: share of pairs whose chosen reward is higher"),
    Metric("{,val/}margin", "", "`rm`: chosen minus rejected reward; mean over the step's pairs"),
    Metric("{,val/}mean_reward", "", "`rm`: mean reward of all answers"),
    Metric("time/val", "s", "a validation; does not count in `time/step`"),
    Metric("progress/epoch", "", "passes over the data that are complete"),
    Metric("progress/num_samples", "samples", "read for training so far, across resumes"),
    Metric("progress/num_tokens", "tokens", "of these samples, prompts included, padding not"),
    Metric("data/seen", "rows", "read so far, over all processes and across resumes; a row counts again in every epoch"),
    Metric("data/truncated", "rows", "of these, cut to `data.seq_len`"),
    Metric("data/split", "rows", "of these, made into several samples (`data.overlong = \"split\"`)"),
    Metric("data/overlong", "rows", "skipped: longer than `data.seq_len`"),
    Metric("data/untrainable", "rows", "skipped: no trained token within `data.seq_len`"),
    Metric("data/bad", "rows", "skipped: no conversation, or one without an answer (`data.on_bad_row`)"),
    Metric("data/unmaskable", "rows", "skipped: the chat template does not show where their messages start and end"),
    Metric("system/ckpt_disk_{free,used,total}_gib", "GiB", "the file system of the run's directory"),
    Metric("system/ckpt_disk_free_ratio", "0 to 1", "its free share"),
    *_SPEED,
)

RL_TRAINER = (
    Metric(f"loss{_STATISTICS}", "", "loss per sequence, scaled so that the mean is the loss of the update"),
    Metric(f"entropy{_STATISTICS}", "nats", "entropy of the policy at each trained token"),
    Metric(f"mismatch_kl{_STATISTICS}", "nats/token", "per sequence: mean of r - log r - 1, r = trainer / engine probability; estimates KL(engine, trainer)"),
    Metric("kl_ent_ratio/mean", "", "`mismatch_kl/mean` divided by `entropy/mean`"),
    Metric(f"{{trainer,inference}}_probs{_STATISTICS}", "0 to 1", "probability of each trained token in the trainer, and in the engine when it sampled it"),
    Metric(f"is_masked{_STATISTICS}", "0 or 1", "per token: left out of the loss by the trust region; with `decoupled`, by the bounds of stale weights"),
    Metric(f"is_masked_{{low,high}}{_STATISTICS}", "0 or 1", "per token: its ratio is below `token_mask_low`, above `token_mask_high`"),
    Metric(f"sequence_masked_{{low,high}}{_STATISTICS}", "0 or 1", "per sequence: its smallest ratio is below `sequence_mask_low`, its largest above `sequence_mask_high`"),
    Metric(f"geo_masked_{{low,high}}{_STATISTICS}", "0 or 1", "per sequence: its geometric mean ratio is below `geo_mask_low`, above `geo_mask_high`"),
    Metric(f"geo_seq_ratio{_STATISTICS}", "", "per sequence: geometric mean of the tokens' ratios"),
    Metric(f"{{masked,unmasked}}_mismatch_kl{_STATISTICS}", "nats/token", "per sequence: `mismatch_kl` of the tokens that the trust region drops, and of those that it keeps"),
    Metric(f"importance_ratio{_STATISTICS}", "", "per token: trainer / engine probability (`decoupled`: by that at the step's start); not with `default`"),
    Metric(f"is_clipped{_STATISTICS}", "0 or 1", "per token: clipping changes its loss; not with `default`"),
    Metric(f"is_clamped{_STATISTICS}", "0 or 1", "per token, with `trainer.loss.rejection` and `clamp`: its stale weight is limited"),
    Metric(f"behave_weight{_STATISTICS}", "", "per token, with `decoupled`: probability at the step's start / engine probability"),
    Metric(f"reference_kl{_STATISTICS}", "nats/token", "per sequence, with `trainer.loss.kl_coef`: KL divergence of the policy from the reference, estimated by k3"),
    Metric(f"sft_loss{_STATISTICS}", "nats", "per token of good rollouts, with `trainer.loss.sft_coef`: its cross-entropy"),
    Metric(f"observation_loss{_STATISTICS}", "nats", "per token that an environment wrote after the first turn, with `trainer.loss.observation_coef`: its cross-entropy"),
    Metric("demonstrations/loss", "nats/token", "with `trainer.demonstrations`: cross-entropy of the trained tokens of the step's demonstrations, weighted with `loss = \"dft\"` and `\"phi\"`; none at a weight of 0"),
    Metric("demonstrations/weight", "", "weight of their loss in this step; 0 while only a critic is trained"),
    Metric("demonstrations/tokens", "tokens", "trained tokens of the step's demonstrations"),
    Metric("demonstrations/epoch", "epochs", "complete passes over the demonstrations"),
    Metric("reference_kl_coef", "", "with `trainer.loss.kl_target`: the weight of the KL penalty in this step"),
    Metric(f"teacher_divergence{_STATISTICS}", "nats/token", "per sequence, with `trainer.distillation`: mean divergence from the teacher's distribution"),
    Metric(f"teacher_kl{_STATISTICS}", "nats/token", "per sequence, with teacher log-probabilities: mean of teacher - trainer log-probability"),
    Metric(f"critic/{{values,returns,advantages}}{_STATISTICS}", "reward", "with `[trainer.critic]`, per token, or per turn with `level = \"turn\"`: its value at the start of the step, its return, and per token its advantage before `whiten`"),
    Metric("critic/explained_variance", "at most 1", "share of the variance of the returns that the values explain; 0 for a constant, 1 for the returns themselves"),
    Metric(f"critic/loss{_STATISTICS}", "", "per token or turn: half of the squared difference of value and return, with `value_clip`"),
    Metric(f"critic/is_clipped{_STATISTICS}", "0 or 1", "per token or turn: `value_clip` raises its loss"),
    Metric("critic/{lr,grad_norm}", "", "as `optim/lr` and `optim/grad_norm`, of the critic"),
    Metric("stats/<name>", "", "what a custom loss [records](own_loss.md#record-statistics)"),
    Metric("perf/memory_while_sampling", "GiB", "reserved on the main process's GPU once its state is in host memory; with `trainer.offload_while_sampling`"),
    Metric("time/wait_for_batch", "s", "waiting for the orchestrator's batch"),
    Metric("time/load_data", "s", "receiving the batch's rows"),
    Metric("time/reference_logprobs", "s", "scoring the batch with the reference model"),
    Metric("time/critic_values", "s", "scoring the batch with the critic, and its advantages"),
    Metric("time/keep_logprobs", "s", "copying the log-probabilities of kept rollouts; a thread writes them"),
    Metric("time/broadcast_weights", "s", "publishing the new weights"),
    Metric("progress/tokens", "tokens", "trained on so far, prompts included, across resumes"),
    Metric("progress/samples", "sequences", "trained on so far, across resumes"),
    *_SPEED,
)

_JUDGES = (
    Metric("judge/<name>/calls", "calls", "answered since the last record, also from the cache"),
    Metric("judge/<name>/cache_hit_rate", "0 to 1", "share of these that the cache answered, or an equal call that was under way"),
    Metric("judge/<name>/latency_s", "s", "mean of a call to its server, with retries, without the wait for its turn"),
    Metric("judge/<name>/{retries,failed_calls}", "calls", "repeated; without an answer after all retries"),
    Metric("judge/<name>/{prompt_tokens,completion_tokens}", "tokens", "of calls to its server, as it counts them"),
    Metric("judge/<name>/cost", "currency", "of these tokens, at `prompt_price` and `completion_price`"),
)

ORCHESTRATOR = (
    Metric("reward/{mean,std,min,max,median}", "reward", "over the rollouts of the batch"),
    Metric("reward/<environment>", "reward", "with several environments: mean of each"),
    Metric("reward_parts/<function>", "reward", "mean of each reward function, without its weight; `reward_parts/<environment>/<function>` with several environments"),
    Metric("metrics/<function>", "", "mean of what the environment measures: functions of weight 0, turns, filters"),
    Metric("val_reward/<statistic>", "reward", "the same as `reward/*`, of `[orchestrator.val]`"),
    Metric("val_reward/errors", "0 to 1", "share of its rollouts with a reward function that raised or returned no finite number"),
    Metric("val_batch/<environment>", "0 to 1", "share of each environment in the validation"),
    Metric("val_trained_prompts/mean", "0 to 1", "share of the validation's prompts that the run trains on"),
    Metric("val_failed/count", "rollouts", "of the validation that failed and have no score"),
    Metric("batch/solve_{none,all}", "0 to 1", "share of groups whose rewards are all 0, all 1"),
    Metric("batch/effective_batch_size", "0 to 1", "share of groups that are neither"),
    Metric("batch/async_level", "steps", "step minus the policy version that the servers hold when the batch is complete"),
    Metric("batch/lag/{mean,max}", "steps", "step minus the version of a rollout's oldest token"),
    Metric("batch/token_lag/{mean,max}", "steps", "step minus the version that sampled a token, over trained tokens"),
    Metric(f"batch/off_policy_level{_RANGE}", "updates", "weight updates while a group was rolled out"),
    Metric("batch/inflight_{rollouts,samples}", "groups; rollouts", "in flight at the end of the step: groups, and the rollouts in them"),
    Metric("batch/cancelled_rollouts", "rollouts", "cancelled since the last step: too many weight updates"),
    Metric("batch/<environment>", "0 to 1", "with several environments: share of the batch's rollouts"),
    Metric(f"{{seq,prefill,decode}}_len{_RANGE}", "tokens", "per rollout: all tokens, those that are not trained on, those that are"),
    Metric(f"samples_per_rollout{_RANGE}", "samples", "token sequences that a rollout becomes"),
    Metric(f"num_turns{_RANGE}", "turns", "model calls of a rollout"),
    Metric(f"is_truncated{_RANGE}", "0 or 1", "the rollout ended at a length limit"),
    Metric(f"{{generation,scoring}}_ms{_RANGE}", "ms", "per rollout, as verifiers measures it"),
    Metric("failed_groups/share", "0 to 1", "share of groups since the last step that failed; they are attempted up to three times, and not trained on"),
    Metric("failed_groups/<environment>/<reason>", "groups", "of them, by what failed: `GroupTimeout`, `EnvironmentEnded`, the class of an error, or `reward.<function>`"),
    Metric("error/mean", "0 to 1", "share of rollouts that ended with an error"),
    Metric("error/<name>", "0 to 1", "share of these errors with this name"),
    Metric("filter/<filter>_{count,rate}", "rollouts; 0 to 1", "rollouts that a filter detects"),
    Metric("filter/total_{detected,enforced}_rate", "0 to 1", "share of rollouts that any filter detects, and that are masked for it"),
    Metric("filtered_rollouts/{easy,hard,equal}", "0 to 1", "share of finished groups that `[orchestrator.buffer]` rejects: all rewards 1, all 0, otherwise equal"),
    Metric("evicted_examples/{easy,hard}", "0 to 1", "share of finished groups whose example is not sampled again"),
    Metric("pool/{easy,normal,hard}", "0 to 1", "share of all examples in each pool"),
    Metric("progress/{tokens,prefill_tokens,decode_tokens}", "tokens", "of this batch: all, not trained on, trained on"),
    Metric("progress/{samples,problems}", "rollouts; groups", "of this batch"),
    Metric("progress/total_{tokens,samples,problems}", "", "so far, across resumes"),
    Metric("progress/ckpt_step", "version", "policy version that the servers hold, or that is evaluated"),
    Metric("elastic/num_{servers,ready_servers}", "servers", "with `client.elastic`: addresses of the name, and servers that take work"),
    Metric("elastic/{joined,left}", "servers", "that began and ceased to take work since the last step"),
    Metric("sampling/temperature", "", "of the step's rollouts"),
    Metric("perf/throughput", "tokens/s", "`progress/tokens` divided by `time/generate_completions`"),
    Metric("time/step", "s", "the whole step"),
    Metric("time/generate_completions", "s", "waiting for the groups of the batch"),
    Metric("time/parallel_preprocess", "s", "filters, advantages and building the batch"),
    Metric("time/teacher_logprobs", "s", "waiting for the teacher's log-probabilities once the batch is full"),
    Metric("time/save_ckpt", "s", "saving the orchestrator's checkpoint"),
    Metric("time/wait_for_ckpt", "s", "waiting for the version that the batch requires"),
    Metric("time/update_weights", "s", "servers loading new weights"),
    Metric("event_loop_lag/{min,mean,med,p90,max}", "s", "how late the orchestrator's event loop runs; a slow reward function that does not await raises it"),
    Metric("event_loop_lag/<environment>/max", "s", "the same for the event loops of an environment's own processes"),
    Metric("event_loop_blocked/<environment>", "s", "time since the last step in which its code blocked an event loop for over a second; `unknown` if several run in one"),
    *_JUDGES,
)

EVALUATION = (
    Metric("eval/<environment>/avg@<n>", "reward", "mean over examples of the mean over n rollouts, without failed ones"),
    Metric("eval/<environment>/pass@<k>", "0 to 1", "probability that one of k rollouts has reward 1; only if all rewards are 0 or 1"),
    Metric("eval/<environment>/reward_parts/<function>", "reward", "mean of each reward function, without its weight"),
    Metric("eval/<environment>/metrics/<function>", "", "mean of each function of weight 0"),
    Metric("eval/<environment>/reward_errors/mean", "0 to 1", "share of rollouts with a reward function that failed"),
    Metric("eval/<environment>/no_response/{mean,count}", "0 to 1; rollouts", "no text and no tool call"),
    Metric("eval/<environment>/completion_len/{mean,max,min}", "tokens", "per rollout: those of answers, and those that the environment wrote between turns"),
    Metric("eval/<environment>/is_truncated/mean", "0 to 1", "share of rollouts that ended at a length limit"),
    Metric("eval/<environment>/failed/{count,mean}", "rollouts; 0 to 1", "failed rollouts, which have no score"),
    Metric("eval/<environment>/trained_prompts/mean", "0 to 1", "share of the evaluated prompts that the run trains on; only during RL"),
    Metric("eval/<environment>/time", "s", "the evaluation of this environment"),
    *_JUDGES,
)
# fmt: on

CATALOG: Mapping[str, tuple[Metric, ...]] = {
    "RL trainer": RL_TRAINER,
    "SFT trainer": SFT,
    "Orchestrator": ORCHESTRATOR,
    "Evaluation": EVALUATION,
}
"""The metrics by part. Those of evaluations have the source `orchestrator` or `eval`."""

INTRODUCTION = """\
# Metrics

Generated with `uv run python -m prime_rl.history.catalog > docs/metrics.md`; tests check that it is up to date, and
that it has every metric that a run writes.

Each line of `OUT/metrics.jsonl` is one JSON object: `time` (seconds since 1970), `source` (`trainer`, `sft`,
`orchestrator` or `eval`), `step` (counted from 0), and the metrics by name. Other monitors get the same names.
`{mean,max}` stands for several names, `<function>` for a reward function, `<environment>` for an environment.

```bash
uv run benchmarks/plot_metrics.py outputs/reverse-text --metric reward/mean --out reward.png
```
"""


def expanded(names: str) -> Iterator[str]:
    """The names that braces stand for: `a/{b,c}` gives `a/b` and `a/c`."""
    parts = re.split(r"\{([^}]*)\}", names)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _pattern(name: str) -> str:
    parts = re.split(r"<[^>]*>", name)
    return r".+".join(re.escape(part) for part in parts)


def is_described(name: str) -> bool:
    return any(metric.covers(name) for metrics in CATALOG.values() for metric in metrics)


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, metrics in CATALOG.items():
        rows = [f"| `{each.names}` | {each.unit} | {each.meaning} |" for each in metrics]
        parts.append("\n".join([f"## {title}", "", "| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
