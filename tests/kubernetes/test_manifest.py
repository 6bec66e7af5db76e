"""What `medarc_submit --to kubernetes` would send: valid for Kubernetes, and without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cluster_schemas import JOBSET, RAYJOB
from typer.testing import CliRunner, Result

from medarc_rl import medarc_submit, medarc_train
from medarc_rl.backends.kubernetes.manifest import ClusterJob, manifest_of, to_yaml
from medarc_rl.backends.kubernetes.request import MAX_JOB_NAME, image_fault, job_name, label_fault
from medarc_rl.backends.ray import driver
from medarc_rl.deployment import device_of, gpus_of_nodes
from prime_rl.configs.ranges import AUTO
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.pydantic_config import load_config, parse_argv_or_exit

IMAGE = "registry.example:5000/medarc/rl:1.0"
SFT = 'max_steps = 2\n[model]\nname = "some/model"\n'
RL = f"{SFT}[trainer]\n[orchestrator]\n[inference]\n"
EVAL = '[model]\nname = "some/model"\n[[env]]\nid = "reverse-text"\n'
KUBERNETES = "1.32"
"""Version whose schemas the manifests are checked with."""


def submit(kind: str, config: Path, *words: object) -> Result:
    always = [kind, str(config), "--to", "kubernetes", "--dry-run"]
    return CliRunner().invoke(medarc_submit.app, [*always, *map(str, words)])


def rendered(kind: str, config: Path, *words: object) -> list[dict[str, Any]]:
    result = submit(kind, config, "--image", IMAGE, "--output-claim", "runs", "--name", "rt", *words)
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all(result.stdout))


def errors(kind: str, config: Path, *words: object) -> list[str]:
    result = submit(kind, config, *words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return [line.removeprefix("error: ") for line in result.stderr.splitlines() if not line.startswith("warning: ")]


def inner_job(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}


def pod_of(template: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }


def container_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (found,) = inner_job(jobset)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def check_kinds(tables: Sequence[dict[str, Any]]) -> None:
    """Validate core kinds with their own schemas, custom ones with ours and their pods as the core kind."""
    for table in tables:
        if table["kind"] == "JobSet":
            jsonschema.validate(table, JOBSET)
            kubernetes_validate.validate(inner_job(table), KUBERNETES, strict=True)
            assert inner_job(table)["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        elif table["kind"] == "RayJob":
            jsonschema.validate(table, RAYJOB)
            cluster = table["spec"]["rayClusterSpec"]
            templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
            for template in (*templates, table["spec"]["submitterPodTemplate"]):
                kubernetes_validate.validate(pod_of(template), KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(table, KUBERNETES, strict=True)


EVERYTHING = (
    *("--env", "NCCL_DEBUG=INFO", "--secret-env", "HF_TOKEN=hub/token", "--secret", "wandb", "--cpus", 3.5),
    *("--memory", "100Gi", "--shm", "16Gi", "--node-selector", "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"),
    *("--toleration", "nvidia.com/gpu", "--toleration", "team=ml:NoSchedule", "--service-account", "runner"),
    *("--pull-secret", "registry", "--user-id", 4242, "--retries", 5, "--deadline", 3600, "--queue", "ml"),
    *("--namespace", "research", "--keep", 60),
)


@pytest.mark.parametrize("words", [(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", ["sft", "rl", "eval"])
def test_a_manifest_is_valid(kind: str, words: tuple[object, ...], tmp_path: Path) -> None:
    config = tmp_path / f"{kind}.toml"
    config.write_text({"sft": SFT, "rl": RL, "eval": EVAL}[kind])
    tables = rendered(kind, config, *words)
    assert [table["kind"] for table in tables] == ["ConfigMap", "JobSet"]
    check_kinds(tables)


@pytest.mark.parametrize(("split", "gpus"), [("--train-gpus 2 --infer-gpus 3", 5), ("--colocate 4", 4)])
def test_options_arrive_in_the_pod(split: str, gpus: int, rl_toml: Path) -> None:
    config, jobset = rendered("rl", rl_toml, *EVERYTHING, *split.split())
    job = inner_job(jobset)["spec"]
    pod, main = job["template"]["spec"], container_of(jobset)
    assert {table["metadata"]["namespace"] for table in (config, jobset)} == {"research"}
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ml"
    assert (job["backoffLimit"], job["activeDeadlineSeconds"], jobset["spec"]["ttlSecondsAfterFinished"]) == (
        5,
        3600,
        60,
    )
    assert main["command"] == [
        *("medarc_train", "rl", "@", "/etc/medarc/rl.toml", *split.split()),
        *("--output-dir", "/output/rt", "--resume", "auto"),
    ]
    assert main["resources"]["limits"] == {"cpu": "3.5", "memory": "100Gi", "nvidia.com/gpu": gpus}
    assert main["resources"]["requests"] == main["resources"]["limits"]
    env = {each["name"]: each.get("value") or each["valueFrom"] for each in main["env"]}
    assert (env["NCCL_DEBUG"], env["HF_TOKEN"]) == ("INFO", {"secretKeyRef": {"name": "hub", "key": "token"}})
    assert main["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
    ]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("runner", True)
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_a_pod_has_no_rights_that_it_does_not_need(sft_toml: Path) -> None:
    pod = inner_job(rendered("sft", sft_toml)[1])["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_a_mistake_is_not_retried_and_an_eviction_is_not_counted(sft_toml: Path) -> None:
    job = inner_job(rendered("sft", sft_toml)[1])["spec"]
    ignore, fail = job["podFailurePolicy"]["rules"]
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [2])
    assert job["backoffLimit"] == 3


def test_the_config_in_the_manifest_is_the_one_that_was_given(rl_toml: Path, tmp_path: Path) -> None:
    config = rendered("rl", rl_toml, "--trainer.optim.lr", "3e-5")[0]
    file = tmp_path / "rl.toml"
    file.write_text(config["data"]["rl.toml"])
    found = load_config(RLConfig, [file])
    assert (found.trainer.optim.lr, str(found.output_dir), found.max_steps) == (3e-5, "/output/rt", 2)
    # What the pod runs takes the file without a word.
    words = ["explain", "@", str(file), "--output-dir", "/output/rt", "--resume", "auto"]
    result = CliRunner().invoke(medarc_train.app, words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output


GOOD = {"--image": IMAGE, "--output-claim": "runs"}


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--output-claim", None, "a pod's own disk is lost with it: add --output-claim CLAIM"),
        ("--image", None, "--image is missing"),
        ("--image", "medarc/rl", "--image 'medarc/rl': add a tag or a digest, as in medarc/rl:1.0"),
        ("--image", "Medarc Rl:1", "--image 'Medarc Rl:1' is not an image"),
        ("--name", "My_Run", "--name 'My_Run': 1 to 47 lower-case letters, digits and inner hyphens: write 'my-run'"),
        ("--name", "a" * 48, "--name"),
        ("--namespace", "-x", "--namespace '-x'"),
        ("--output-claim", "Runs", "--output-claim 'Runs'"),
        ("--output-dir", "/data/x", "--output-dir '/data/x': name a directory in the claim"),
        ("--output-dir", "../x", "--output-dir '../x'"),
        ("--output-dir", "ä" * 128, f"--output-dir '{'ä' * 128}': each name in it has at most 255 bytes"),
        ("--output-dir", "s3://x", "output directory s3://x: a bucket's name has 3 to 63"),
        ("--output-dir", "gs://bucket/x", "--output-dir 'gs://bucket/x': name a directory in the claim"),
        ("--queue", "q" * 64, f"--queue '{'q' * 64}': 1 to 63 lower-case letters"),
        ("--memory", "\uff16\uff14Gi", "--memory '\uff16\uff14Gi': write a number of bytes"),
        ("--memory", "0Gi", "--memory '0Gi': write a number of bytes"),
        ("--shm", "0.0", "--shm '0.0': write a number of bytes"),
        ("--memory", "lots", "--memory 'lots': write a number of bytes with a unit, as in 64Gi"),
        ("--env", "A-B=1", "--env 'A-B': write NAME=VALUE"),
        ("--secret-env", "HF_TOKEN=hf_abc", "--secret-env 'HF_TOKEN': write NAME=SECRET/KEY"),
        ("--node-selector", "gpu", "--node-selector: write LABEL=VALUE"),
        ("--toleration", "a=b:Always", "--toleration 'a=b:Always': write KEY"),
        ("--gpu-resource", "gpu", "--gpu-resource 'gpu': write VENDOR/NAME"),
        ("--resume", "40", "--resume 40: each retry would go back to step 40; add --retries 0"),
    ],
)
def test_a_wrong_option_is_one_line(option: str, value: str | None, fault: str, sft_toml: Path) -> None:
    given = {**GOOD, option: value}
    words = [word for name, text in given.items() if text is not None for word in (name, text)]
    assert errors("sft", sft_toml, *words, "--max-steps", 50)[0].startswith(fault)


def test_nothing_is_named_twice_where_the_cluster_takes_a_name_once(sft_toml: Path) -> None:
    words = ("--secret-env", "HF_HOME=places/hf", "--pull-secret", "a", "--pull-secret", "a")
    given = [word for pair in GOOD.items() for word in pair]
    result = CliRunner().invoke(
        medarc_submit.app, ["sft", str(sft_toml), "--to", "kubernetes", *given, *words, "--dry-run"]
    )
    _, jobset = yaml.safe_load_all(result.stdout)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    names = [variable["name"] for variable in pod["containers"][0]["env"]]
    assert names.count("HF_HOME") == 1
    assert pod["imagePullSecrets"] == [{"name": "a"}]


def test_all_faults_are_told_at_once(sft_toml: Path) -> None:
    lines = errors("sft", sft_toml, "--namespace", "A", "--no-such-key", 1)
    assert [line.partition(" ")[0] for line in lines[:3]] == ["--namespace", "--image", "a"]
    assert "no-such-key" in lines[3]


def test_several_nodes_need_ray_and_a_directory_that_all_share(sft_toml: Path) -> None:
    several = ("--image", IMAGE, "--nodes", 2, "--gpus", 1, "--data.batch-size", 2)
    jobset, lost = errors("sft", sft_toml, *several, "--output-dir", "s3://bucket/rt", "--engine", "jobset")
    assert jobset == "--engine jobset: several nodes need --engine ray"
    assert lost.startswith("2 nodes: all pods need the run's directory: add --output-claim CLAIM")


@pytest.mark.parametrize(
    ("kind", "words", "pods", "gpus"),
    [
        ("sft", ("--engine", "ray", "--gpus", 4), 1, 4),
        ("sft", ("--nodes", 3, "--gpus", 4, "--data.batch-size", 12), 3, 4),
        ("sft", ("--nodes", 2, "--gpus", 1, "--device", "cpu", "--data.batch-size", 2), 2, 0),
        ("rl", ("--engine", "ray", "--train-gpus", 2, "--infer-gpus", 3), 1, 5),
        ("rl", ("--engine", "ray", "--single-gpu", "--output-dir", "s3://bucket/rt"), 1, 1),
        ("rl", ("--engine", "ray", "--colocate", 4), 1, 4),
        ("rl", ("--train-nodes", 1, "--infer-nodes", 2, "--train-gpus", 8, "--infer-gpus", 8), 3, 8),
        ("rl", ("--allocation-mode", "vllm:d8+fsdp:d4", "--deployment.gpus-per-node", 4), 3, 4),
        ("sft", ("--allocation-mode", "d16", "--data.batch-size", 16), 2, 8),
    ],
)
def test_a_ray_cluster_has_what_the_driver_asks_for(
    kind: str, words: tuple[object, ...], pods: int, gpus: int, tmp_path: Path
) -> None:
    file = tmp_path / f"{kind}.toml"
    file.write_text({"sft": SFT, "rl": RL}[kind])
    tables = rendered(kind, file, *words)
    check_kinds(tables)
    config, policy, ray = tables
    assert (policy["kind"], ray["kind"]) == ("NetworkPolicy", "RayJob")
    cluster = ray["spec"]["rayClusterSpec"]
    assert 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"]) == pods
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert (group["rayStartParams"]["num-gpus"], limits.get("nvidia.com/gpu", 0)) == (str(gpus), gpus)

    python, dash_m, module, *argv = shlex.split(ray["spec"]["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", driver.__name__)
    options, given = driver._options(argv)
    assert (options.address, options.kind) == ("auto", kind)
    mounted = tmp_path / "mounted.toml"
    mounted.write_text(config["data"][f"{kind}.toml"])
    assert given[:2] == ["@", f"/etc/medarc/{kind}.toml"]
    parsed = parse_argv_or_exit(driver.ROOTS[kind], argv=["@", str(mounted), *given[2:]])
    on_gpus = device_of(parsed) != "cpu"
    assert [count * on_gpus for count in gpus_of_nodes(parsed, options.colocate is not None)] == [gpus] * pods
    assert (str(parsed.output_dir), parsed.ckpt.resume_step) == ("/output/rt", AUTO)
    assert (parsed.launcher == "ray") == (pods > 1)


def test_nodes_of_the_config_count_without_options(sft_toml: Path) -> None:
    sft_toml.write_text(
        f"{sft_toml.read_text()}\n[deployment]\ntype = 'multi_node'\nnum_nodes = 2\ngpus_per_node = 8\n"
    )
    ray = rendered("sft", sft_toml)[2]
    (workers,) = ray["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["rayStartParams"]) == (1, {"num-gpus": "8"})


def test_an_sft_pod_also_has_the_gpus_that_evaluate(sft_toml: Path) -> None:
    sft_toml.write_text(f"{sft_toml.read_text()}\n[eval]\n[[eval.env]]\nid = 'reverse-text'\n")
    main = container_of(rendered("sft", sft_toml, "--gpus", 2)[1])
    assert main["resources"]["limits"]["nvidia.com/gpu"] == 3
    assert "--gpus" not in main["command"], "the config says how many of them train"


def test_a_run_that_is_kept_on_s3_needs_no_claim(rl_toml: Path) -> None:
    result = submit("rl", rl_toml, "--image", IMAGE, "--name", "rt", "--output-dir", "s3://bucket/runs/rt")
    assert (result.exit_code, "error" in result.stderr) == (0, False), result.output
    config, jobset = yaml.safe_load_all(result.stdout)
    pod, main = inner_job(jobset)["spec"]["template"]["spec"], container_of(jobset)
    place = ["--output-dir", "s3://bucket/runs/rt", "--storage.work-dir", "/output/rt", "--resume", "auto"]
    assert main["command"][-6:] == place
    assert main["livenessProbe"]["exec"]["command"][-1] == "/output/rt"
    assert {"name": "output", "emptyDir": {}} in pod["volumes"]
    assert 'upload_to = "s3://bucket/runs/rt"' in config["data"]["rl.toml"]


def test_a_run_that_downloads_first_has_longer_to_start(sft_toml: Path) -> None:
    def limit_s(*words: str) -> int:
        probe = container_of(rendered("sft", sft_toml, *words)[1])["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert (limit_s(), limit_s("--model.name", "s3://bucket/models/big")) == (900, 14_400)


@pytest.mark.parametrize(
    ("kind", "words", "fault"),
    [
        ("sft", ("--launcher", "slurm"), "launcher = 'slurm': start this run with `medarc_slurm sft"),
        ("sft", ("--launcher", "local", "--engine", "ray"), "launcher = 'local': start this run with `medarc_train"),
        ("rl", ("--orchestrator.client.base-url", "http://x/v1", "--no-inference"), "this command starts the"),
    ],
)
def test_what_the_pod_would_refuse_is_refused_here(
    kind: str, words: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    config = tmp_path / f"{kind}.toml"
    config.write_text({"sft": SFT, "rl": RL}[kind])
    (line,) = errors(kind, config, "--image", IMAGE, "--output-claim", "runs", *words)
    assert line.startswith(fault)


@pytest.mark.parametrize("output", ["a b", "it's", "$HOME", "$(id)", "`id`", "a;id", "s3://bucket/a b"])
def test_a_ray_jobs_command_holds_nothing_that_a_shell_would_read(output: str, sft_toml: Path) -> None:
    given = ("--image", IMAGE, "--output-claim", "runs", "--output-dir", output)
    (line,) = errors("sft", sft_toml, *given, "--engine", "ray")
    assert line.startswith(f"--output-dir {output!r}: a RayJob gives it to shells")


@pytest.mark.parametrize("word", ["WANDB_API_KEY=abc", "NOTE=hf_abcdefghijklmnopqrstuv"])
def test_a_literal_secret_is_refused_and_not_repeated(word: str, sft_toml: Path) -> None:
    (line,) = errors("sft", sft_toml, "--image", IMAGE, "--output-claim", "runs", "--env", word)
    name, _, value = word.partition("=")
    assert f"write --secret-env {name}=SECRET/KEY" in line
    assert value not in line


def test_a_directory_that_each_pod_continues_is_not_cleaned(sft_toml: Path) -> None:
    words = ("--image", IMAGE, "--output-claim", "runs", "--ckpt.interval", 1, "--clean-output-dir")
    (line,) = errors("sft", sft_toml, *words)
    assert line.startswith("clean_output_dir: each pod would delete what the pod before it wrote")


def test_kubernetes_replaces_nothing_in_what_was_typed(sft_toml: Path) -> None:
    main = container_of(rendered("sft", sft_toml, "--env", "A=$(HOME) $$b", "--output-dir", "$(A)")[1])
    assert {"name": "A", "value": "$$(HOME) $$$$b"} in main["env"]
    assert "/output/$$(A)" in main["command"]
    assert main["livenessProbe"]["exec"]["command"][-1] == "/output/$$(A)"


def test_a_variable_has_one_value(sft_toml: Path) -> None:
    words = ("--env", "A=1", "--env", "A=2", "--secret-env", "A=b/c", "--secret-env", "A=b/d")
    assert errors("sft", sft_toml, "--image", IMAGE, "--output-claim", "runs", *words) == [
        "--env A: given twice",
        "--secret-env A: given twice",
        "--env A: also given with --secret-env",
    ]


PEM = '-----BEGIN PRIVATE KEY-----\nMIIEvQ"IBADANBgkqhkiG\n9w0BAQEFAASCBKcwggSj\n'


@pytest.mark.parametrize(
    ("secret", "name"),
    [
        ("s3cr3t-value", "is s3cr3t-value"),
        ('s3cr3t"\\value', 'is s3cr3t"\\value'),
        (PEM, f"is {PEM}"),
        (PEM, "9w0BAQEFAASCBKcwggSj alone"),
    ],
)
def test_a_secret_in_the_config_is_refused_by_key(
    secret: str, name: str, sft_toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", secret)
    words = ("--image", IMAGE, "--output-claim", "runs", "--wandb.name", name)
    (line,) = errors("sft", sft_toml, *words)
    assert line.startswith("wandb.name: the resolved config holds a secret")
    assert "s3cr3t" not in line
    assert "9w0BAQEFAASCBKcwggSj" not in line


def test_a_config_that_no_config_map_holds_is_refused(rl_toml: Path) -> None:
    prompt = "x" * 1_000_000
    rl_toml.write_text(
        rl_toml.read_text().replace(
            "[orchestrator]", f"[[orchestrator.env]]\nid = 'e'\n[orchestrator.env.args]\np = '{prompt}'\n[orchestrator]"
        )
    )
    lines = errors("rl", rl_toml, "--image", IMAGE, "--output-claim", "runs")
    assert any("and a ConfigMap holds 1,000,000" in line for line in lines)


def test_a_cpu_run_asks_for_no_gpu(sft_toml: Path) -> None:
    main = container_of(rendered("sft", sft_toml, "--device", "cpu")[1])
    assert main["resources"]["limits"] == {"cpu": "8", "memory": "32Gi"}
    assert "--gpus" not in main["command"]


def test_several_nodes_become_a_ray_cluster() -> None:
    argv = ["python", "-m", "x", "rl", "@", "/etc/medarc/it's $(rl).toml"]
    job = ClusterJob(
        name="big", namespace="ml", kind="rl", config="a = 1\n", argv=argv, image=IMAGE, nodes=3, gpus=8, claim="runs"
    )
    tables = manifest_of(job, ray=True)
    check_kinds(tables)
    _, policy, ray = tables
    assert shlex.split(ray["spec"]["entrypoint"]) == argv
    (workers,) = ray["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["rayStartParams"]) == (2, {"num-gpus": "8"})
    for group in (ray["spec"]["rayClusterSpec"]["headGroupSpec"], workers):
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    # Ray's ports are open to pods of the job, and the dashboard to the operator.
    assert policy["spec"]["podSelector"]["matchLabels"] == {"medarc-rl/job": "big"}
    assert [len(rule.get("ports", ())) for rule in policy["spec"]["ingress"]] == [0, 1]
    assert list(yaml.safe_load_all(to_yaml(tables))) == tables


@pytest.mark.parametrize(
    "image",
    ["a:1", "a/b:1", "localhost:5000/a:1", "ghcr.io/x/y@sha256:" + "a" * 64, "x/y:1.0@sha256:" + "0" * 64],
)
def test_images_with_a_tag_or_digest_are_taken(image: str) -> None:
    assert list(image_fault(image)) == []


@pytest.mark.parametrize("stem", ["rl_cpu", "Ünïcode", "a" * 200, "--", "1.7B", ""])
def test_names_made_of_a_file_name_are_valid_and_differ(stem: str) -> None:
    first, second = job_name(None, stem, "rl"), job_name(None, stem, "rl")
    assert first != second
    assert list(label_fault("--name", first, MAX_JOB_NAME)) == []
