"""The real kubectl, with an API server that keeps what it is sent: a job from its submission to its end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_cluster import SmallCluster, served
from typer.testing import CliRunner, Result

from medarc_rl import medarc_jobs, medarc_submit

OLDEST_MINOR = 30
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/rt"
CONFIG_MAP = "/api/v1/namespaces/ml/configmaps/rt"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallCluster]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: install Kubernetes' command line")
    asked = ["kubectl", "version", "--client", "--output=json"]
    told = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    if int(re.sub(r"\D", "", told["clientVersion"]["minor"])) < OLDEST_MINOR:
        pytest.skip(f"this kubectl asks for more than the small cluster has: 1.{OLDEST_MINOR} is needed")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = SmallCluster()
    with served(found, tmp_path / "kubeconfig"):
        yield found


def submit(config: Path, *words: str) -> Result:
    always = ["sft", str(config), "--to", "kubernetes", "--image", "x/y:1", "--output-claim", "runs", "--name", "rt"]
    return CliRunner().invoke(medarc_submit.app, [*always, "--namespace", "ml", "--context", "lab", *words])


def jobs(*words: str) -> Result:
    return CliRunner().invoke(medarc_jobs.app, list(words))


def without_uid(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, "metadata": {key: value for key, value in table["metadata"].items() if key != "uid"}}


def test_a_job_from_its_submission_to_its_end(cluster: SmallCluster, sft_toml: Path) -> None:
    result = submit(sft_toml)
    assert result.exit_code == 0, result.output
    assert cluster.dry_runs == [CONFIG_MAP, JOBSET]
    printed = list(yaml.safe_load_all(submit(sft_toml, "--dry-run").stdout))
    config, jobset = cluster.objects[CONFIG_MAP], cluster.objects[JOBSET]
    (owner,) = config["metadata"].pop("ownerReferences")
    assert (owner["kind"], owner["uid"]) == ("JobSet", jobset["metadata"]["uid"])
    assert [without_uid(config), without_uid(jobset)] == printed
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rt-run-0-0-abcde", "namespace": "ml", "labels": {"medarc-rl/job": "rt"}},
        "spec": {"nodeName": "n7", "containers": [{"name": "medarc"}]},
        "status": {"phase": "Running"},
    }
    cluster.objects["/api/v1/namespaces/ml/pods/rt-run-0-0-abcde"] = pod
    cluster.logs["rt-run-0-0-abcde"] = "step 1\nstep 2\n"
    assert json.loads(jobs("status", "rt", "--json").stdout)[0]["detail"] == "on n7"
    assert jobs("logs", "rt").stdout == "step 1\nstep 2\n"
    cluster.objects[JOBSET]["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    assert jobs("logs", "rt", "-f").stdout == "step 1\nstep 2\n"
    assert jobs("wait", "rt").exit_code == 0
    again = submit(sft_toml)
    assert (again.exit_code, "namespace ml has such a jobset" in again.stderr) == (2, True)


def test_cancelling_removes_the_job_and_its_config(cluster: SmallCluster, sft_toml: Path) -> None:
    submit(sft_toml)
    result = jobs("cancel", "rt")
    assert (result.exit_code, cluster.objects) == (0, {}), result.output
    assert jobs("wait", "rt").exit_code == 3


def test_a_job_that_has_the_name_of_a_deleted_one_is_neither_shown_nor_cancelled_in_its_place(
    cluster: SmallCluster, sft_toml: Path
) -> None:
    submit(sft_toml)
    another = cluster.objects[JOBSET]
    another["metadata"]["uid"] = "of another submission"
    (found,) = json.loads(jobs("status", "rt", "--json").stdout)
    assert (found["state"], found["detail"]) == (
        "unknown",
        "this job was deleted: the cluster has a newer job with the same name",
    )
    for word in ("logs", "cancel"):
        result = jobs(word, "rt")
        assert (result.exit_code, "this job was deleted" in result.stderr) == (1, True), result.output
    assert cluster.objects[JOBSET] is another


def test_a_cluster_that_cannot_be_reached_is_one_line(cluster: SmallCluster, sft_toml: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    result = submit(sft_toml)
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, len(told)) == (1, 1), result.stderr
    assert "127.0.0.1:1 was refused" in told[0]


def test_a_cluster_without_jobset_is_left_as_it_is(cluster: SmallCluster, sft_toml: Path) -> None:
    cluster.without("jobset.x-k8s.io")
    result = submit(sft_toml)
    assert (result.exit_code, cluster.objects) == (1, {})
    told = result.stderr.splitlines()
    assert told[-1] == (
        "error: the cluster has no controller for this kind of job: install JobSet or KubeRay in it, or choose the "
        "other --engine"
    )


def test_a_config_map_of_somebody_else_is_neither_changed_nor_given_to_the_job(
    cluster: SmallCluster, sft_toml: Path
) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rt"}, "data": {"notes": "mine"}}
    cluster.objects[CONFIG_MAP] = dict(theirs)
    result = submit(sft_toml)
    assert (result.exit_code, cluster.objects) == (2, {CONFIG_MAP: theirs})
    assert "error: --name rt: namespace ml has such a configmap: give another name, or delete it" in result.stderr
