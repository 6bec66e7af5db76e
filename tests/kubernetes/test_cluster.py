"""Jobs in a cluster, through a kubectl that writes down what it was given and answers what the test tells it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from medarc_rl import medarc_jobs, medarc_submit
from medarc_rl.backends.kubernetes.backend import Kubernetes, jobset_status, rayjob_status
from medarc_rl.backends.kubernetes.pod_probe import MAX_SILENCE_S, main
from medarc_rl.backends.ray.driver import STOPS_ITSELF
from medarc_rl.errors import MedarcError
from medarc_rl.jobs import JobLog, JobRecord, Status
from prime_rl.run.lock import run_lock
from prime_rl.run.process import HeartbeatWriter, clear_heartbeats

FAKE = """#!{python}
import json, os, pathlib, sys
place = pathlib.Path({place!r})
words = [word for word in sys.argv[1:] if not word.startswith("--request-timeout")]
piped = sys.stdin.read() if "--filename=-" in words else ""
with (place / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([words, piped]) + "\\n")
for key, answer in json.loads((place / "answers.json").read_text()).items():
    if all(word in words for word in key.split()):
        sys.stdout.write(answer.get("out", ""))
        sys.stderr.write(answer.get("err", ""))
        sys.exit(answer.get("code", 0))
"""
"""Answers the first known key whose words are all among its own; silence with exit code 0 is the answer to others."""


class FakeKubectl:
    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        program = place / "kubectl"
        program.write_text(FAKE.format(python=sys.executable, place=str(place)))
        program.chmod(0o755)
        self.answer({})

    def answer(self, answers: dict[str, Any]) -> None:
        (self.place / "answers.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        file = self.place / "calls.jsonl"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.place}{os.pathsep}{os.environ['PATH']}")
    return fake


def submit(config: Path, *words: str) -> Result:
    always = ["sft", str(config), "--to", "kubernetes", "--image", "x/y:1", "--output-claim", "runs", "--name", "rt"]
    return CliRunner().invoke(medarc_submit.app, [*always, *words])


def jobs(*words: str) -> Result:
    return CliRunner().invoke(medarc_jobs.app, list(words))


def pods(*found: dict[str, Any]) -> dict[str, str]:
    items = [
        {"metadata": {"name": f"rt-{index}", "creationTimestamp": f"2026-01-01T00:00:0{index}Z"}, **each}
        for index, each in enumerate(found)
    ]
    return {"out": json.dumps({"items": items})}


def shown(**status: Any) -> dict[str, str]:
    return {"out": json.dumps({"status": status})}


SPEC = {"nodeName": "n1", "containers": [{"name": "medarc"}]}
RUNNING = {"spec": SPEC, "status": {"phase": "Running"}}
COMPLETED = shown(conditions=[{"type": "Completed", "status": "True"}])


def test_a_submission_is_checked_sent_and_recorded(kubectl: FakeKubectl, sft_toml: Path) -> None:
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "rt", "uid": "u-1"}
    made = {**owner, "metadata": {"uid": "u-1"}}
    kubectl.answer({"--output=json jobset": {"out": json.dumps(made)}})
    result = submit(sft_toml, "--namespace", "ml", "--context", "lab")
    assert (result.exit_code, "stays in the cluster" in result.stderr) == (0, False), result.output
    assert "submitted to kubernetes: jobset/rt" in result.stdout
    before = ["--context=lab", "--namespace=ml"]
    apply = [*before, "apply", "--server-side", "--field-manager=medarc-rl", "--filename=-"]
    (looked, _), (tried, checked), (applied, sent), _, (given, _) = kubectl.calls
    assert looked == [*before, "get", "jobset,configmap", "rt", "--ignore-not-found", "--output=name"]
    assert (tried, applied) == ([*apply, "--dry-run=server"], apply)
    change = json.dumps({"metadata": {"ownerReferences": [owner]}})
    assert given == [*before, "patch", "configmap", "rt", "--type=merge", f"--patch={change}"]
    printed = submit(sft_toml, "--namespace", "ml", "--context", "lab", "--dry-run")
    assert checked == sent == printed.stdout
    assert len(kubectl.calls) == 5, "a dry run calls nobody"
    record = JobLog.of_user().find("rt")
    assert (record.id, record.output) == ("jobset/rt", "runs:/output/rt")
    assert record.details == {"namespace": "ml", "context": "lab", "resource": "jobset", "uid": "u-1"}


@pytest.mark.parametrize(
    ("answers", "code", "lines"),
    [
        ({"get rt": {"out": "jobset.jobset.x-k8s.io/rt\n"}}, 2, ["--name rt: namespace default has such a jobset"]),
        ({"get rt": {"out": "configmap/rt\n"}}, 2, ["--name rt: namespace default has such a configmap: give another"]),
        (
            {"--dry-run=server": {"code": 1, "err": 'error: no matches for kind "JobSet" in version "x"\n'}},
            1,
            ["no matches for kind", "the cluster has no controller for this kind of job"],
        ),
        ({"get": {"code": 1, "err": "Unable to connect to the server: dial tcp\n"}}, 1, ["Unable to connect"]),
        ({"--dry-run=server": {"code": 1, "err": "Error: forbidden: User x\n"}}, 1, ["Error: forbidden"]),
    ],
)
def test_a_refusal_keeps_the_clusters_words_and_changes_nothing(
    answers: dict[str, Any], code: int, lines: list[str], kubectl: FakeKubectl, sft_toml: Path
) -> None:
    kubectl.answer(answers)
    result = submit(sft_toml)
    assert result.exit_code == code
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == len(lines)
    assert all(each.startswith(f"error: {line}") for each, line in zip(told, lines, strict=True))
    assert not [words for words, _ in kubectl.calls if words[-1] == "--filename=-"], "nothing was applied"
    assert JobLog.of_user().read() == ([], [])


def test_a_job_is_looked_for_in_the_cluster_that_it_was_sent_to(kubectl: FakeKubectl, sft_toml: Path) -> None:
    kubectl.answer({"config current-context": {"out": "lab\n"}})
    assert submit(sft_toml).exit_code == 0
    kubectl.answer({"config current-context": {"out": "production\n"}, "get": {"out": "{}"}})
    assert jobs("cancel", "rt").exit_code == 0
    asked = [words for words, _ in kubectl.calls if words[0] != "config"]
    assert {words[0] for words in asked} == {"--context=lab"}


def test_a_job_that_cannot_be_made_the_owner_goes_on(kubectl: FakeKubectl, sft_toml: Path) -> None:
    kubectl.answer({"--output=json jobset": {"code": 1, "err": "Error from server (Forbidden): no\n"}})
    result = submit(sft_toml)
    assert (result.exit_code, JobLog.of_user().find("rt").id) == (0, "jobset/rt"), result.output
    assert "warning: the config of rt stays in the cluster when the job is deleted: Error from server" in result.stderr


def test_a_job_is_known_by_its_uid_though_its_other_objects_may_not_be_changed(
    kubectl: FakeKubectl, sft_toml: Path
) -> None:
    made = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"uid": "u-1"}}
    refusal = {"code": 1, "err": "Error from server (Forbidden): no\n"}
    kubectl.answer({"--output=json jobset": {"out": json.dumps(made)}, "patch": refusal})
    assert submit(sft_toml).exit_code == 0
    assert JobLog.of_user().find("rt").details["uid"] == "u-1"


def test_options_of_another_back_end_are_refused(sft_toml: Path) -> None:
    words = ["sft", str(sft_toml), "--to", "sagemaker", "--namespace", "ml", "--toleration", "gpu"]
    result = CliRunner().invoke(medarc_submit.app, words)
    told = "error: --{} is an option of --to kubernetes, not of sagemaker"
    assert (result.exit_code, result.stderr.splitlines()) == (2, [told.format("namespace"), told.format("toleration")])


def test_without_kubectl_one_line_says_so(sft_toml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = submit(sft_toml)
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, told) == (
        1,
        ["error: kubectl: not found: install it, or print the manifest with --dry-run and send it from elsewhere"],
    )


def test_a_job_is_waited_for_and_its_pods_talk_in_turn(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    ended = {"spec": SPEC, "status": {"phase": "Failed"}}
    answers = {
        "get jobset": COMPLETED,
        "get pods": pods(ended, {"spec": SPEC, "status": {"phase": "Succeeded"}}, {"status": {"phase": "Pending"}}),
        "logs rt-0": {"out": "step 1\n"},
        "logs rt-1": {"out": "step 2\nstep 3"},
    }
    kubectl.answer(answers)
    assert jobs("logs", "rt", "-f").stdout == "step 1\nstep 2\nstep 3\n"
    assert [words[2:] for words, _ in kubectl.calls if "logs" in words] == [
        ["rt-0", "--all-containers", "--follow", "--timestamps"],
        ["rt-1", "--all-containers", "--follow", "--timestamps"],
    ]
    assert jobs("wait", "rt").exit_code == 0


BEFORE = "{0}1.1Z a\n{0}2.5Z b\n{0}2.5Z b\n{0}2.6Z half of".format(DAY := "2026-01-01T00:00:0")
AFTER = BEFORE + f" c\n{DAY}2.6Z d\nno time\n{DAY}3.0Z e"
BROKEN = {"code": 1, "err": "error: unexpected EOF\n"}


def followed() -> list[str]:
    job = JobLog.of_user().find("rt")
    return list(Kubernetes(pause=lambda seconds: None).logs(job, follow=True))


@pytest.mark.parametrize("end", [BROKEN, {"code": 0}])
def test_a_connection_that_breaks_neither_loses_nor_repeats_lines(
    end: dict[str, Any], kubectl: FakeKubectl, sft_toml: Path
) -> None:
    submit(sft_toml)
    answers = {
        "get pods": pods(RUNNING),
        "get pod": {"out": json.dumps({"status": {"phase": "Succeeded"}})},
        "get jobset": COMPLETED,
        f"logs --since-time={DAY}1Z": {"out": AFTER},
        "logs": {"out": BEFORE, **end},
    }
    kubectl.answer(answers)
    assert followed() == ["a", "b", "b", "half of c", "d", "no time", "e"]


def test_a_connection_that_always_breaks_is_told_in_the_end(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    kubectl.answer({"get pods": pods(RUNNING), "get jobset": shown(), "logs": BROKEN})
    with pytest.raises(MedarcError, match="the output of pod rt-0 breaks off, 10 times: unexpected EOF"):
        followed()


def test_the_output_of_a_deleted_pod_ends(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    gone = {"code": 1, "err": 'Error from server (NotFound): pods "rt-0" not found\n', "out": f"{DAY}1Z a\n"}
    kubectl.answer({"get pods": pods(RUNNING), "get jobset": COMPLETED, "logs": gone})
    assert followed() == ["a"]


STOPPED = shown(jobDeploymentStatus="Complete", jobStatus="STOPPED")
SUBMITTER = {"spec": {"containers": [{"name": "ray-job-submitter"}]}, "status": {"phase": "Succeeded"}}


def test_a_ray_job_that_stops_itself_has_failed(kubectl: FakeKubectl, sft_toml: Path) -> None:
    assert submit(sft_toml, "--nodes", "2").exit_code == 0
    answers = {"get rayjob": STOPPED, "get pods": pods(SUBMITTER)}
    kubectl.answer({**answers, "logs rt-0": {"out": f"error: model.name: nothing\n{STOPS_ITSELF}\n"}})
    record = JobLog.of_user().find("rt")
    assert Kubernetes().status(record) == Status("failed", "error: model.name: nothing")
    kubectl.answer({**answers, "logs rt-0": {"out": "step 1\n"}})
    assert Kubernetes().status(record) == Status("cancelled", "the Ray job was stopped")


def test_a_pod_that_runs_between_two_looks_is_not_missed(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    kubectl.answer({"get pods": pods()})
    ended = pods({"spec": SPEC, "status": {"phase": "Succeeded"}})

    class EndsAfterTheLook(Kubernetes):
        def status(self, record: JobRecord) -> Status:
            kubectl.answer({"get pods": ended, "logs rt-0": {"out": "step 1\n"}})
            return Status("succeeded")

    assert list(EndsAfterTheLook().logs(JobLog.of_user().find("rt"), follow=True)) == ["step 1"]


@pytest.mark.parametrize(("condition", "code"), [("Completed", 0), ("Failed", 1)])
def test_a_submission_that_waits_exits_with_the_jobs_result(
    condition: str, code: int, kubectl: FakeKubectl, sft_toml: Path
) -> None:
    answers = {"--output=json jobset": shown(conditions=[{"type": condition, "status": "True"}]), "get pods": pods()}
    kubectl.answer(answers)
    result = submit(sft_toml, "--wait")
    assert (result.exit_code, JobLog.of_user().find("rt").last_status is not None) == (code, True), result.output


def test_logs_of_a_job_that_waits_say_why(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    kubectl.answer({"get jobset": shown(), "get pods": pods()})
    result = jobs("logs", "rt")
    assert (result.exit_code, result.stderr) == (1, "error: no output yet: the job is queued: no pod yet\n")


def test_a_cancelled_job_stays_cancelled_though_the_cluster_forgets_it(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml, "--namespace", "ml")
    kubectl.answer({"get jobset": shown(), "get pods": pods(RUNNING)})
    assert jobs("cancel", "rt").exit_code == 0
    deleted = [words[1:] for words, _ in kubectl.calls if "delete" in words]
    assert deleted == [
        ["delete", "jobset", "rt", "--wait=false"],
        ["delete", "configmap", "--selector=medarc-rl/job=rt", "--wait=false", "--ignore-not-found"],
    ]
    kubectl.answer({"get jobset": {"code": 1, "err": 'Error from server (NotFound): "rt" not found'}})
    assert jobs("wait", "rt").exit_code == 3


def test_a_deleted_job_is_unknown(kubectl: FakeKubectl, sft_toml: Path) -> None:
    submit(sft_toml)
    kubectl.answer({"get jobset": {"code": 1, "err": 'Error from server (NotFound): "rt" not found'}})
    assert jobs("wait", "rt").exit_code == 4


WAITING = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
KILLED = {"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}


@pytest.mark.parametrize(
    ("status", "found", "expected"),
    [
        ({}, [], Status("queued", "no pod yet")),
        ({}, [{"status": {"phase": "Pending", **WAITING}}], Status("queued", "ImagePullBackOff: no such image")),
        (
            {},
            [{"status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]}}],
            Status("queued", "Unschedulable: 0/3 nodes"),
        ),
        ({}, [RUNNING], Status("running", "on n1")),
        ({}, [{"status": {"phase": "Failed", **KILLED}}, RUNNING], Status("running", "on n1; attempt 2")),
        (
            {"conditions": [{"type": "Failed", "status": "True", "message": "backoff limit"}]},
            [{"status": {"phase": "Failed", **KILLED}}],
            Status("failed", "backoff limit; exit code 137 (OOMKilled)"),
        ),
        (
            {"conditions": [{"type": "Suspended", "status": "True"}]},
            [],
            Status("queued", "suspended; with Kueue, a job is suspended until it is admitted"),
        ),
        ({"conditions": [{"type": "Completed", "status": "True"}]}, [], Status("succeeded")),
        ({"conditions": [{"type": "Completed", "status": "False"}]}, [RUNNING], Status("running", "on n1")),
    ],
)
def test_states_of_a_jobset(status: dict[str, Any], found: list[dict[str, Any]], expected: Status) -> None:
    assert jobset_status({"status": status}, found) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, Status("queued", "no pod yet")),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, Status("running")),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, Status("succeeded")),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, Status("cancelled", "the Ray job was stopped")),
        (
            {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "exit code 1"},
            Status("failed", "exit code 1"),
        ),
        ({"jobDeploymentStatus": "ValidationFailed", "message": "bad"}, Status("failed", "bad")),
        ({"jobDeploymentStatus": "Retrying"}, Status("queued", "no pod yet")),
        ({"jobDeploymentStatus": "New and unheard"}, Status("unknown")),
    ],
)
def test_states_of_a_rayjob(status: dict[str, Any], expected: Status) -> None:
    assert rayjob_status({"status": status}, []) == expected


def test_the_probes_follow_a_run_from_its_start_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def probed() -> list[int]:
        return [main([what, str(tmp_path)]) for what in ("started", "live", "ready")]

    lock, beat = tmp_path / "run.lock", tmp_path / "control" / "trainer.beat"
    assert probed() == [1, 0, 1], "nothing has begun"
    clear_heartbeats(beat)
    with run_lock(tmp_path):
        assert probed() == [0, 0, 1], "no process has begun"
        beats = HeartbeatWriter(beat)
        beats.say("loading")
        assert probed() == [0, 0, 1], "it loads"
        beats.started()
        beats.say("step 1")
        assert probed() == [0, 0, 0], "it works"
    assert main(["live", str(tmp_path)]) == 0, "it has released the run, and is ending"
    lock.write_text(json.dumps({"host": "pod", "pid": 1, "since": "now"}))
    silent_s = time.time() - MAX_SILENCE_S - 60
    os.utime(lock, (silent_s, silent_s))
    assert probed() == [1, 1, 1], "the launcher has stopped"
    assert "the launcher has not reported for" in capsys.readouterr().out
    assert main(["nonsense"]) == 2


def test_the_manifest_is_readable_yaml(kubectl: FakeKubectl, sft_toml: Path) -> None:
    text = submit(sft_toml, "--dry-run").stdout
    assert "  sft.toml: |\n    " in text
    assert len(list(yaml.safe_load_all(text))) == 2
