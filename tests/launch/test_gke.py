"""The Kubernetes manifest, validated by published schemas, and the script with a stand-in for
kubectl.
"""

import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tests.launch.conftest import STAND_INS
from vit_jax.hosts.cluster import read_jobset_process

LAUNCH = Path(__file__).parents[2] / "launch"
KUBERNETES = "1.33"
WORDS = ["--", "pretrain", "--config=configs/x.py:ViT-H/14"]
COMMON = ["--name=vit-h", "--image=registry.example/vit:1"]
BUCKET = ["--workdir=gs://bucket/runs/h"]
TPU = [
    *COMMON,
    *BUCKET,
    "--accelerator=tpu-v5-lite-podslice",
    "--topology=16x16",
]
GPU = [
    *COMMON,
    "--workdir=claim:nfs/runs/h",
    "--accelerator=nvidia-h100-80gb",
    "--hosts=4",
    "--chips_per_host=8",
]
CPU = [*COMMON, *BUCKET, "--accelerator=cpu", "--hosts=2"]
SELECTOR = (
    "jobset.sigs.k8s.io/jobset-name=vit-h,jobset.sigs.k8s.io/job-index=0,"
    "batch.kubernetes.io/job-completion-index=0"
)
LOGS = [
    "logs",
    "--follow",
    "--container=vit-jax",
    f"--selector={SELECTOR}",
    "--tail=-1",
]
STATE = [
    "get",
    "jobset",
    "vit-h",
    "--ignore-not-found",
    "--output=jsonpath={.status.terminalState}/{.status.restarts}",
]
PLANNED = [
    "plan",
    "--topology=1*v5e:16x16",
    "--arithmetic",
    "--json",
    "--config=configs/x.py:ViT-H/14",
]


CHECKED = [
    *WORDS[1:],
    "--workdir=/workdir/runs/h",
    "--check",
    "--devices=256",
    "--slices=1",
    "--remote=/",
]


@pytest.fixture
def stage(stage):
    """A stage with a stand-in for vit-jax here, which checks the recipe before the cluster is asked
    for anything.
    """
    stage.install(STAND_INS / "vit-jax")
    return stage


renderer = runpy.run_path(str(LAUNCH / "render_jobset.py"))


def render(words):
    return yaml.safe_load(renderer["render"](words))


def validate(manifest):
    """Hold the Job to the schema of Kubernetes, without unknown fields, and the JobSet around it to
    that of its CRD.
    """
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)

    # The conversion excludes unknown fields, and adds defaults of the template.
    known = JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    known["spec"]["replicatedJobs"][0]["template"] = replicated["template"]
    assert known == manifest


def get_parts(manifest):
    """Return the replicated job, its pod, and the container."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    return replicated, pod, pod["containers"][0]


def get_job(manifest):
    replicated, _, _ = get_parts(manifest)
    return replicated["template"]["spec"]


EVERY_OPTION = [
    "--max_hours=10",
    "--data_bucket=gs://images",
    "--service_account=trainer",
    "--spot",
    "--pull",
    "--slices=2",
]


@pytest.mark.parametrize("options", [[], EVERY_OPTION], ids=["plain", "every option"])
@pytest.mark.parametrize("machine", [TPU, GPU, CPU], ids=["tpu", "gpu", "cpu"])
def test_manifest_keeps_to_the_schema(machine, options):
    manifest = render([*machine, *options, *WORDS])
    validate(manifest)

    with pytest.raises(AssertionError):
        validate(manifest | {"spec": manifest["spec"] | {"failurePolice": {}}})

    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 4
    with pytest.raises(kubernetes_validate.ValidationError, match="paralelism"):
        validate(manifest)


def test_slices_of_a_tpu():
    manifest = render([*TPU, "--slices=2", "--spot", *WORDS])
    replicated, pod, container = get_parts(manifest)
    job = get_job(manifest)
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

    assert replicated["replicas"] == 2
    assert job["parallelism"] == 64
    assert job["completions"] == 64
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
        "cloud.google.com/gke-spot": "true",
    }
    assert manifest["metadata"]["annotations"] == exclusive
    assert "env" not in container, "GKE sets the variables that JAX reads"


def test_labels_are_those_of_the_jobset():
    labels = ["--label=kueue.x-k8s.io/queue-name=team", "--label=owner=", "--label=a_b.C=1-x"]

    manifest = render([*TPU, *labels, *WORDS])

    expected = {"kueue.x-k8s.io/queue-name": "team", "owner": "", "a_b.C": "1-x"}
    assert manifest["metadata"]["labels"] == expected
    assert "labels" not in render([*TPU, *WORDS])["metadata"]


def test_shares_of_a_study_are_jobsets_of_their_own():
    words = [
        *GPU,
        "--shares=2",
        "--",
        "study",
        "scaling",
        "--config=configs/x.py",
    ]
    manifests = list(yaml.safe_load_all(renderer["render"](words)))

    assert len(manifests) == 2
    for index, manifest in enumerate(manifests):
        validate(manifest)
        _, _, container = get_parts(manifest)
        assert manifest["metadata"]["name"] == f"vit-h-{index}"
        assert container["args"] == [
            "study",
            "scaling",
            "--config=configs/x.py",
            "--workdir=/workdir/runs/h",
            f"--index={index}",
            "--count=2",
        ]

    with pytest.raises(ValueError, match="pretrain is one run; study, sweep, vtab have several"):
        render([*GPU, "--shares=2", *WORDS])


def read_variables(container):
    """Return the environment variables of a container: a value, or the path of the field with the
    value.
    """
    variables = {}
    for one in container["env"]:
        value = one.get("value")
        variables[one["name"]] = value or one["valueFrom"]["fieldRef"]["fieldPath"]
    return variables


def test_gpus_are_told_where_the_others_are():
    manifest = render([*GPU, "--slices=3", *WORDS])
    replicated, pod, container = get_parts(manifest)

    assert read_variables(container) == {
        "JOBSET_NAME": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']",
        "REPLICATED_JOB_NAME": "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']",
        "JOB_INDEX": "metadata.annotations['jobset.sigs.k8s.io/job-index']",
        "PROCESSES_IN_JOB": "4",
        "NUM_JOBS": "3",
    }
    assert replicated["replicas"] == 3
    assert get_job(manifest)["parallelism"] == 4
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "nfs"}
    assert "annotations" not in manifest["metadata"]


def test_variables_of_gpus_are_those_that_vit_jax_reads():
    replicated, _, container = get_parts(render([*GPU, "--slices=3", *WORDS]))
    variables = read_variables(container) | {
        "JOBSET_NAME": "vit-h",
        "REPLICATED_JOB_NAME": replicated["name"],
        "JOB_INDEX": "2",
        # Kubernetes sets this variable.
        "JOB_COMPLETION_INDEX": "1",
    }

    place = read_jobset_process(variables)

    assert place.num_processes == 12
    assert place.process_id == 9
    assert place.coordinator == "vit-h-worker-0-0.vit-h:8476"
    assert {"containerPort": 8476} in container["ports"]


def find_failure(rules, code):
    """Return the reason and the message of the failure of a Job, by the rules of its pods."""
    for number, rule in enumerate(rules):
        codes = rule.get("onExitCodes", {"values": [None]})["values"]
        if code in codes:
            failed = f"Container vit-jax failed with exit code {code}"
            return "PodFailurePolicy", f"{failed} matching FailJob rule at index {number}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def find_action(rules, reason, message):
    """Return the action of a JobSet after a failure of a Job."""
    for rule in rules:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        is_matched = any(re.search(pattern, message) for pattern in patterns)
        if reason in rule["onJobFailureReasons"] and is_matched:
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (2, "FailJobSet"),
        (75, "RestartJobSetAndIgnoreMaxRestarts"),
        # Without a code the node was taken away.
        (None, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, "RestartJobSet"),
        (1, "RestartJobSet"),
    ],
)
def test_exit_codes_meet_their_rules(code, expected):
    """The rules of the JobSet tell the rules of the Job apart by their number: both lists have to
    agree.
    """
    manifest = render([*GPU, "--max_failures=5", *WORDS])
    policy = manifest["spec"]["failurePolicy"]
    rules = get_job(manifest)["podFailurePolicy"]["rules"]

    reason, message = find_failure(rules, code)

    assert find_action(policy["rules"], reason, message) == expected
    assert policy["maxRestarts"] == 5


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            TPU,
            {
                "gke-gcsfuse/volumes": "true",
                "gke-gcsfuse/cpu-limit": "0",
                "gke-gcsfuse/memory-limit": "0",
                "gke-gcsfuse/ephemeral-storage-limit": "0",
            },
        ),
        (GPU, {}),
    ],
    ids=["bucket", "claim"],
)
def test_what_mounts_buckets_is_not_short_of_anything(machine, expected):
    """GKE's defaults for it are a quarter of a core, 256 MiB of memory and 5 GiB of disk."""
    template = get_job(render([*machine, *WORDS]))["template"]
    assert template.get("metadata", {}).get("annotations", {}) == expected


def test_workdir_in_a_bucket_is_one_folder_for_all():
    _, pod, container = get_parts(render([*TPU, "--data_bucket=gs://images", *WORDS]))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    assert container["args"] == [
        "pretrain",
        "--config=configs/x.py:ViT-H/14",
        "--workdir=/workdir/runs/h",
    ]
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}

    workdir = volumes["workdir"]["csi"]["volumeAttributes"]
    no_cache = "metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
    assert workdir["bucketName"] == "bucket"
    assert no_cache in workdir["mountOptions"]
    assert "file-cache" not in workdir["mountOptions"]

    data = volumes["data"]["csi"]
    options = data["volumeAttributes"]["mountOptions"]
    cache = "file-cache:max-size-mb:51200,file-cache:cache-file-for-range-read:true"
    assert data["readOnly"] is True
    assert data["volumeAttributes"]["bucketName"] == "images"
    assert "metadata-cache:ttl-secs:-1" in options
    assert cache in options


@pytest.mark.parametrize(
    "word",
    [
        "--config.note=it's",
        '--config.note="a" # b',
        "--config.note=${name}",
        "--config.a=ü",
    ],
)
def test_words_for_the_run_pass_untouched(word):
    """Kubernetes reads two dollar signs as one."""
    *_, container = get_parts(render([*TPU, "--", "pretrain", word]))
    assert container["args"][1] == word.replace("$", "$$")


def test_every_value_is_quoted():
    values = {"a": "x\nhostPID: true", "c": '4", d: "'}
    manifest = renderer["fill"]("a: ${a}\nb: {c: ${c}}\n", values, ())

    assert yaml.safe_load(manifest) == {"a": values["a"], "b": {"c": values["c"]}}


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips_per_host", "expected"),
    [
        ("tpu-v5-lite-podslice", "1x1", None, (1, 1)),
        ("tpu-v5-lite-podslice", "2x2", None, (1, 4)),
        ("tpu-v5-lite-podslice", "2x4", 8, (1, 8)),
        ("tpu-v5-lite-podslice", "2x4", 4, (2, 4)),
        ("tpu-v6e-slice", "8x16", None, (32, 4)),
        ("tpu-v4-podslice", "2x2x1", None, (1, 4)),
        ("tpu-v4-podslice", "4x4x8", None, (32, 4)),
        ("tpu-v5p-slice", "8x8x8", None, (128, 4)),
        ("tpu7x", "4x4x4", None, (16, 4)),
    ],
)
def test_hosts_follow_from_the_topology(
    accelerator,
    topology,
    chips_per_host,
    expected,
):
    assert renderer["count_hosts_and_chips"](accelerator, topology, chips_per_host) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TPU, "--topology=3x3", *WORDS], "--topology=3x3: tpu-v5-lite-podslice has 1x1, "),
        ([*TPU, "--topology=4x4x4", *WORDS], "--topology=4x4x4: tpu-v5-lite-podslice has"),
        ([*TPU, "--topology=2x4", *WORDS], "one host of 8 chips or two hosts of 4"),
        (
            [*TPU, "--chips_per_host=8", *WORDS],
            "--chips_per_host=8: hosts of a 16x16 slice have 4 chips",
        ),
        (
            [*TPU, "--chips_per_host=1", *WORDS],
            "--chips_per_host=1: hosts of a 16x16 slice have 4 chips",
        ),
        ([*TPU, "--accelerator=tpu-v4-podslice", "--topology=8x4x4", *WORDS], "the smallest first"),
        ([*TPU, "--accelerator=tpu-v9", *WORDS], "--accelerator='tpu-v9': must be cpu, nvidia-"),
        ([*TPU, "--hosts=3", *WORDS], "given by --topology"),
        ([*GPU, "--topology=2x2", *WORDS], "--topology=2x2 is of TPUs"),
        ([*GPU[:-1], *WORDS], "--chips_per_host is needed with GPUs"),
        ([*CPU, "--chips_per_host=4", *WORDS], "there are none with --accelerator=cpu"),
        ([*TPU, "--name=ViT", *WORDS], "--name=ViT: must be at most"),
        ([*TPU, "--name=" + "a" * 60, *WORDS], "must be at most 45 lower-case"),
        (
            [*TPU, "--service_account=a\nhostPID: true", *WORDS],
            r"--service_account='a\nhostPID: true': must be",
        ),
        (
            [*GPU, "--accelerator=nvidia-a\nhostPID: true", *WORDS],
            r"--accelerator='nvidia-a\nhostPID: true': must be",
        ),
        ([*CPU, '--cpus=4", x: "', *WORDS], "--cpus='4\", x: \"': must be a quantity"),
        ([*CPU, "--memory=16 GB", *WORDS], "--memory='16 GB': must be a quantity"),
        ([*TPU, "--workdir=/runs", *WORDS], "--workdir=/runs: must be gs://BUCKET/FOLDER"),
        ([*TPU, "--data_bucket=gs://images/x", *WORDS], "must name a bucket"),
        ([*TPU, "--data_bucket=gs://a..b", *WORDS], "--data_bucket=gs://a..b: must name a bucket"),
        ([*TPU, "--data_bucket=gs://ab-", *WORDS], "--data_bucket=gs://ab-: must name a bucket"),
        (
            [*TPU, "--workdir=claim:a..b/x", *WORDS],
            "--workdir=claim:a..b/x: must be gs://BUCKET/FOLDER, or claim:",
        ),
        ([*TPU, "--service_account=a..b", *WORDS], "--service_account='a..b': must be"),
        ([*TPU, "--service_account=$(id)", *WORDS], "--service_account='$(id)': must be"),
        ([*TPU, "--image=$(id)", *WORDS], "--image='$(id)': must be REGISTRY/NAME:TAG"),
        (
            [*TPU, "--image=registry/../vit:1", *WORDS],
            "--image='registry/../vit:1': must be REGISTRY/NAME:TAG",
        ),
        ([*TPU, "--image=vit jax", *WORDS], "--image='vit jax': must be REGISTRY/NAME:TAG"),
        (
            [*GPU, "--accelerator=nvidia-l4-", *WORDS],
            "--accelerator='nvidia-l4-': must be cpu, nvidia-",
        ),
        ([*TPU, "--slices=0", *WORDS], "--slices=0: must be 1 or more"),
        ([*TPU, "--label=queue", *WORDS], "--label=queue: must be KEY=VALUE"),
        ([*TPU, "--label=-a=b", *WORDS], "--label=-a=b: must be KEY=VALUE"),
        ([*TPU, "--label=a/b/c=d", *WORDS], "--label=a/b/c=d: must be KEY=VALUE"),
        ([*TPU, "--label=a=b c", *WORDS], "--label=a=b c: must be KEY=VALUE"),
        ([*TPU, "--label=a=" + 64 * "b", *WORDS], "with at most 63"),
        ([*TPU, "--label=a=b\nc: d", *WORDS], "must be KEY=VALUE"),
        ([*TPU, "--label=a=b", "--label=a=c", *WORDS], "--label=a=c: a is given twice"),
        ([*TPU], "give the command to run after --"),
        ([*TPU, "--", "pretrain", "--workdir=x"], "--workdir=x follows --"),
        ([*TPU, "--learning_rate=1", *WORDS], "unrecognized arguments: --learning_rate=1"),
    ],
)
def test_mistakes_are_rejected(stage, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render(words)


@pytest.mark.parametrize(
    "image", ["REGISTRY/vit-jax:1", "localhost:5000/a/b_c:v1.2", "r.io/x@sha256:" + 64 * "a"]
)
def test_images_by_tag_and_digest(image):
    *_, container = get_parts(render([*TPU, f"--image={image}", *WORDS]))
    assert container["image"] == image


@pytest.mark.parametrize("name", ["$(id)", "a/b", "..", "A", "a-"])
def test_a_namespace_that_kubernetes_would_not_accept(stage, name):
    result = stage.run(
        "gke.sh",
        "status",
        "--name=vit-h",
        f"--namespace={name}",
    )

    assert result.returncode == 2
    assert stage.calls() == []
    assert f"--namespace={name}: must be" in result.stderr


def test_one_command_from_the_manifest_to_the_end(stage):
    not_there = "echo 'pods are not there yet' >&2; exit 1"
    place = "--namespace=team"
    follow = [[*LOGS, place], [*STATE, place]]
    stage.answers("get", "echo /0", "echo /1", "echo /1", "echo Completed/1")
    stage.answers("logs", not_there, "echo step 1", "exit 1", "echo step 2")

    result = stage.run(
        "gke.sh",
        "run",
        *TPU,
        place,
        "--poll_seconds=0",
        *WORDS,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "step 1\nstep 2\n"
    assert "no log to follow now" in result.stderr
    assert result.stderr.count("vit-h was restarted (1 so far)") == 1
    assert "vit-h has finished, after 1 restart(s)" in result.stderr

    assert stage.calls()[:2] == [["vit-jax", *CHECKED], ["vit-jax", *PLANNED]]
    assert yaml.safe_load((stage.folder / "applied").read_text()) == render([*TPU, *WORDS])

    calls = stage.calls("kubectl")
    later_logs = calls[3::2]
    for call in later_logs:
        assert call.pop(-2).startswith("--since-time=20")
    assert calls == [["apply", "--filename=-", place], *follow * 4]


def test_dry_run_prints_exactly_what_is_executed(stage):
    result = stage.run("gke.sh", "run", *TPU, "--dry-run", *WORDS)
    assert stage.calls() == []

    stage.answers("get", "echo Completed/0")
    stage.run("gke.sh", "run", *TPU, *WORDS)

    check, plan, manifest, *lines = (shlex.split(line) for line in result.stdout.splitlines())
    assert check[1:] == CHECKED
    assert plan[1:] == PLANNED
    assert manifest == ["./launch/render_jobset.py", *TPU, *WORDS, "|"]
    assert lines == stage.calls()[2:]


MOUNT_BUCKET = "mount /workdir gs://bucket"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            [*TPU, "--slices=2"],
            ["devices 512", "slices 2", MOUNT_BUCKET, "chips 512", "topology 2*v5e:16x16"],
        ),
        # A chip has two devices.
        (
            [*TPU, "--accelerator=tpu7x", "--topology=2x2x2"],
            ["devices 16", "slices 1", MOUNT_BUCKET, "chips 8"],
        ),
        # A node of GPUs is a slice.
        (
            GPU,
            ["devices 32", "slices 4", "mount /workdir claim:nfs", "chips 32", "topology 4*h100:8"],
        ),
        (
            [*CPU, "--data_bucket=gs://images"],
            ["devices 2", "slices 1", MOUNT_BUCKET, "chips 0", "mount /data gs://images"],
        ),
    ],
    ids=["tpu", "two devices", "gpu", "cpu"],
)
def test_machines_as_vit_jax_counts_them(machine, expected):
    devices, slices, *rest = expected
    lines = renderer["render"]([*machine, "--machine", *WORDS]).splitlines()

    assert lines == [devices, slices, "workdir /workdir/runs/h", *rest]


@pytest.mark.parametrize(
    ("unseen", "address"),
    [
        ("/data/tfds/cifar10", "gs://images/tfds/cifar10"),
        ("/workdir/runs/before", "gs://bucket/runs/before"),
    ],
)
@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_run_is_checked_before_it_is_submitted(
    stage,
    command,
    unseen,
    address,
):
    stage.answers("check", f"echo 'not visible from here: {unseen}'")
    stage.answers("ls", "true")
    stage.answers("get", "echo Completed/0")

    result = stage.run(
        "gke.sh",
        command,
        *TPU,
        "--data_bucket=gs://images",
        *WORDS,
    )

    assert result.returncode == 0, result.stderr
    assert stage.calls("vit-jax") == [CHECKED, PLANNED]
    assert stage.calls("gcloud") == [["storage", "ls", address]]
    assert stage.calls("kubectl")


NOT_FOUND = "gs://images/tfds/cifar10 was looked for and not found"

NOT_MOUNTED = "/photos: the machines of the run do not have this path"


@pytest.mark.parametrize(
    ("unseen", "found", "message", "looks"),
    [
        (
            "/data/tfds/cifar10",
            "exit 1",
            NOT_FOUND,
            [["storage", "ls", "gs://images/tfds/cifar10"]],
        ),
        ("/photos", "true", NOT_MOUNTED, []),
    ],
)
@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_run_whose_data_are_missing_is_not_submitted(
    stage,
    command,
    unseen,
    found,
    message,
    looks,
):
    stage.answers("check", f"echo 'not visible from here: {unseen}'")
    stage.answers("ls", found)

    result = stage.run(
        "gke.sh",
        command,
        *TPU,
        "--data_bucket=gs://images",
        *WORDS,
    )

    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert stage.calls("vit-jax") == [CHECKED]
    assert stage.calls("gcloud") == looks
    assert not stage.calls("kubectl")


LOOK_FOR_DATA = ["storage", "ls", "gs://images/tfds"]


def test_a_recipe_that_cannot_start_is_not_submitted(stage):
    stage.answers("check", "echo 'config.optimzer: there is no such field' >&2; exit 2")
    result = stage.run("gke.sh", "submit", *TPU, *WORDS)

    assert result.returncode == 2
    assert "there is no such field" in result.stderr
    assert stage.calls("kubectl") == []


@pytest.mark.parametrize(
    ("options", "verb", "calls"),
    [
        (["--no_check"], "pretrain", [LOOK_FOR_DATA]),
        ([], "evaluate", []),
        (["--shares=2"], "study", []),
    ],
)
def test_runs_that_are_not_checked(stage, options, verb, calls):
    words = [
        "--",
        verb,
        "--config=configs/x.py",
        "--config.input.data_dir=/data/tfds",
    ]
    result = stage.run(
        "gke.sh",
        "submit",
        *TPU,
        "--data_bucket=gs://images",
        *options,
        *words,
    )

    assert result.returncode == 0, result.stderr
    assert ("the recipe is not checked here" in result.stderr) == (verb == "pretrain")
    assert stage.calls("gcloud") == calls
    assert not stage.calls("vit-jax")


TOOLS = (
    "bash",
    "env",
    "readlink",
    "dirname",
    "cat",
    "mktemp",
    "rm",
    "tail",
    "head",
    "sed",
    "awk",
    "nvidia-smi",
    "flock",
)


def test_data_on_a_volume_of_the_cluster_are_named(stage):
    stage.answers("check", "echo 'not visible from here: /workdir/weights'")
    result = stage.run("gke.sh", "submit", *GPU, *WORDS)

    assert result.returncode == 0, result.stderr
    assert "/workdir/weights is on the volume claim:nfs and is not looked for" in result.stderr


def test_data_that_cannot_be_looked_for_without_gcloud_are_named(stage):
    stage.answers("check", "echo 'not visible from here: /data/tfds'")
    programs = stage.folder / "bin"
    programs.mkdir()
    for name in TOOLS:
        (programs / name).symlink_to(shutil.which(name) or "/bin/true")
    (programs / "python3").symlink_to(sys.executable)
    (programs / "kubectl").symlink_to("/bin/true")

    words = ["submit", *TPU, "--data_bucket=gs://images", *WORDS]
    result = stage.run("gke.sh", *words, PATH=str(programs))

    assert result.returncode == 0, result.stderr
    assert "gcloud is not installed here: gs://images/tfds is not looked for" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["log", "--name=vit-h", "--no_check"], "--no_check is of run and submit"),
        (["log", "--name=vit-h", "--price=2"], "--price is of run and submit"),
        (["run", *TPU, "--topology=3x3", *WORDS], "--topology=3x3"),
    ],
)
def test_commands_that_are_rejected(stage, words, message):
    result = stage.run("gke.sh", *words)

    assert result.returncode == 2
    assert message in result.stderr
    assert stage.calls() == []


@pytest.mark.parametrize(
    ("words", "kind", "script", "message"),
    [
        (
            ["log", "--name=vit-h"],
            "get",
            "true",
            "there is no JobSet vit-h",
        ),
        (
            ["log", "--name=vit-h", "--poll_seconds=0"],
            "get",
            "echo 'timed out' >&2; exit 1",
            "cost money",
        ),
        (
            ["run", *TPU, *WORDS],
            "apply",
            "exit 1",
            "JobSet 0.10 or newer is not installed",
        ),
    ],
    ids=["no JobSet", "no cluster", "no CRD"],
)
def test_runs_that_fail(stage, words, kind, script, message):
    stage.answers(kind, script)
    result = stage.run("gke.sh", *words)

    assert result.returncode == 1
    assert message in result.stderr
    assert stage.calls() != []


def test_the_reason_of_a_failed_jobset_is_shown(stage):
    stage.answers("get", "echo Failed/3", "echo 'jobset failed: mistake'")
    result = stage.run("gke.sh", "log", "--name=vit-h")

    assert result.returncode == 1
    assert "vit-h has failed, after 3 restart(s)" in result.stderr
    assert "jobset failed: mistake" in result.stderr


BAD_FOLDERS = (
    "../other",
    "runs/..",
    "runs/./x",
    "runs//x",
    "$(HOSTNAME)/x",
    "`id`",
    "a b",
    "x\ty",
)


@pytest.mark.parametrize("place", ["gs://bucket", "claim:nfs"])
@pytest.mark.parametrize("folder", BAD_FOLDERS)
def test_folders_that_are_rejected(stage, place, folder):
    message = f"--workdir={place}/{folder}: parts of the folder must be"
    with pytest.raises(ValueError, match=re.escape(message)):
        render([*TPU, f"--workdir={place}/{folder}", *WORDS])


def test_status_and_delete(stage):
    assert stage.run("gke.sh", "status", "--name=vit-h").returncode == 0
    assert stage.run("gke.sh", "delete", "--name=vit-h").returncode == 0
    assert stage.calls("kubectl") == [
        ["get", "jobset", "vit-h"],
        ["get", "pods", "--selector=jobset.sigs.k8s.io/jobset-name=vit-h", "--output=wide"],
        ["get", "events", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"],
        ["delete", "jobset", "vit-h"],
    ]


def test_ctrl_c_says_what_goes_on(stage):
    stage.answers("logs", "echo step 1; sleep 600")
    with stage.start("gke.sh", "run", *TPU, *WORDS) as process:
        assert process.stdout.readline() == "step 1\n"
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=300)

    assert process.returncode == 130
    assert "./launch/gke.sh delete --name=vit-h" in stderr
