"""The Kubernetes manifest, validated by published schemas, and the script with a stand-in for kubectl."""

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
TPU = [*COMMON, *BUCKET, "--accelerator=tpu-v5-lite-podslice", "--topology=16x16"]
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
LOGS = ["logs", "--follow", "--container=vit-jax", f"--selector={SELECTOR}", "--tail=-1"]
STATE = ["get", "jobset", "vit-h", "--ignore-not-found"]
STATE += ["--output=jsonpath={.status.terminalState}/{.status.restarts}"]
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
    """A stage with a stand-in for vit-jax here, which checks the recipe before the cluster is asked for anything."""
    stage.install(STAND_INS / "vit-jax")
    return stage


renderer = runpy.run_path(str(LAUNCH / "render_jobset.py"))


def render(words):
    return yaml.safe_load(renderer["render"](words))


def validate(manifest):
    """Hold the Job to the schema of Kubernetes, without unknown fields, and the JobSet around it to that of its CRD."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    known = JobsetV1alpha2JobSet.from_dict(manifest).to_dict()  # leaves unknown fields out
    known["spec"]["replicatedJobs"][0]["template"] = replicated[
        "template"
    ]  # whose defaults it adds
    assert known == manifest


def parts(manifest):
    """The replicated job, its pod, and the container."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    return replicated, pod, pod["containers"][0]


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
    replicated, pod, container = parts(manifest)
    job = replicated["template"]["spec"]

    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (2, 64, 64)
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
        "cloud.google.com/gke-spot": "true",
    }

    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert manifest["metadata"]["annotations"] == exclusive
    assert "env" not in container  # GKE sets what JAX reads


def test_shares_of_a_study_are_jobsets_of_their_own():
    words = [*GPU, "--shares=2", "--", "study", "scaling", "--config=configs/x.py"]
    manifests = list(yaml.safe_load_all(renderer["render"](words)))
    for index, manifest in enumerate(manifests):
        validate(manifest)
        assert manifest["metadata"]["name"] == f"vit-h-{index}"
        assert parts(manifest)[2]["args"] == [
            *words[-3:],
            "--workdir=/workdir/runs/h",
            f"--index={index}",
            "--count=2",
        ]

    assert len(manifests) == 2
    with pytest.raises(ValueError, match="pretrain is one run; study, sweep, vtab have several"):
        render([*GPU, "--shares=2", *WORDS])


def test_gpus_are_told_where_the_others_are():
    manifest = render([*GPU, "--slices=3", *WORDS])
    replicated, pod, container = parts(manifest)
    values = {
        one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
    }

    assert values == {
        "JOBSET_NAME": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']",
        "REPLICATED_JOB_NAME": "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']",
        "JOB_INDEX": "metadata.annotations['jobset.sigs.k8s.io/job-index']",
        "PROCESSES_IN_JOB": "4",
        "NUM_JOBS": "3",
    }
    assert (replicated["replicas"], replicated["template"]["spec"]["parallelism"]) == (3, 4)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "nfs"}
    assert "annotations" not in manifest["metadata"]

    # The names and numbers are those that vit_jax/hosts reads; Kubernetes sets
    # JOB_COMPLETION_INDEX.
    known = {"JOBSET_NAME": "vit-h", "REPLICATED_JOB_NAME": replicated["name"], "JOB_INDEX": "2"}
    process = read_jobset_process(values | known | {"JOB_COMPLETION_INDEX": "1"})

    assert (process.num_processes, process.process_id) == (12, 9)
    assert process.coordinator == "vit-h-worker-0-0.vit-h:8476"
    assert {"containerPort": 8476} in container["ports"]


def test_exit_codes_meet_their_rules():
    """The rules of the JobSet tell the rules of the Job apart by their number: both lists have to agree."""
    manifest = render([*GPU, "--max_failures=5", *WORDS])
    policy = manifest["spec"]["failurePolicy"]
    rules = parts(manifest)[0]["template"]["spec"]["podFailurePolicy"]["rules"]

    def action(code=None):
        reason = "BackoffLimitExceeded"
        message = "Job has reached the specified backoff limit"
        for number, rule in enumerate(rules):
            if code in rule.get("onExitCodes", {"values": [None]})["values"]:
                reason = "PodFailurePolicy"
                message = f"Container vit-jax failed with exit code {code} matching FailJob rule at index {number}"
                break
        for rule in policy["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(
                re.search(pattern, message) for pattern in patterns
            ):
                return rule["action"]
        return "RestartJobSet"

    not_counted = "RestartJobSetAndIgnoreMaxRestarts"  # without a code the node was taken away
    expected = {
        2: "FailJobSet",
        75: not_counted,
        None: not_counted,
        137: "RestartJobSet",
        1: "RestartJobSet",
    }

    assert {code: action(code) for code in expected} == expected
    assert policy["maxRestarts"] == 5


def test_what_mounts_buckets_is_not_short_of_anything():
    """GKE's defaults for it are a quarter of a core, 256 MiB of memory and 5 GiB of disk."""

    def annotations(words):
        replicated, *_ = parts(render([*words, *WORDS]))
        return replicated["template"]["spec"]["template"].get("metadata", {}).get("annotations", {})

    limits = {f"gke-gcsfuse/{name}-limit": "0" for name in ("cpu", "memory", "ephemeral-storage")}

    assert annotations(TPU) == {"gke-gcsfuse/volumes": "true"} | limits
    assert annotations(GPU) == {}, "a claim"


def test_workdir_in_a_bucket_is_one_folder_for_all():
    _, pod, container = parts(render([*TPU, "--data_bucket=gs://images", *WORDS]))
    assert container["args"] == [
        "pretrain",
        "--config=configs/x.py:ViT-H/14",
        "--workdir=/workdir/runs/h",
    ]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    workdir = volumes["workdir"]["csi"]
    data = volumes["data"]["csi"]

    assert workdir["volumeAttributes"]["bucketName"] == "bucket"
    assert (
        "metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
        in workdir["volumeAttributes"]["mountOptions"]
    )
    assert (data["readOnly"], data["volumeAttributes"]["bucketName"]) == (True, "images")

    cached = data["volumeAttributes"]["mountOptions"]
    assert "metadata-cache:ttl-secs:-1" in cached
    assert "file-cache:max-size-mb:51200,file-cache:cache-file-for-range-read:true" in cached
    assert "file-cache" not in workdir["volumeAttributes"]["mountOptions"]
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}


@pytest.mark.parametrize(
    "word", ["--config.note=it's", '--config.note="a" # b', "--config.note=${name}", "--config.a=ü"]
)
def test_words_for_the_run_pass_untouched(word):
    *_, container = parts(render([*TPU, "--", "pretrain", word]))
    assert container["args"][1] == word.replace("$", "$$")  # which Kubernetes reads as one


def test_every_value_is_quoted():
    manifest = renderer["fill"](
        "a: ${a}\nb: {c: ${c}}\n", {"a": "x\nhostPID: true", "c": '4", d: "'}, ()
    )
    assert yaml.safe_load(manifest) == {"a": "x\nhostPID: true", "b": {"c": '4", d: "'}}


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
def test_hosts_follow_from_the_topology(accelerator, topology, chips_per_host, expected):
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
        *(
            (
                [*TPU, f"--workdir={place}/{folder}", *WORDS],
                f"--workdir={place}/{folder}: parts of the folder must be",
            )
            for place in ("gs://bucket", "claim:nfs")
            for folder in (
                "../other",
                "runs/..",
                "runs/./x",
                "runs//x",
                "$(HOSTNAME)/x",
                "`id`",
                "a b",
                "x\ty",
            )
        ),
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
        ([*TPU], "give the command to run after --"),
        ([*TPU, "--", "pretrain", "--workdir=x"], "--workdir=x follows --"),
        ([*TPU, "--learning_rate=1", *WORDS], "unrecognized arguments: --learning_rate=1"),
    ],
)
def test_mistakes_are_refused(stage, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render(words)


@pytest.mark.parametrize(
    "image", ["REGISTRY/vit-jax:1", "localhost:5000/a/b_c:v1.2", "r.io/x@sha256:" + 64 * "a"]
)
def test_images_by_tag_and_digest(image):
    *_, container = parts(render([*TPU, f"--image={image}", *WORDS]))
    assert container["image"] == image


@pytest.mark.parametrize("name", ["$(id)", "a/b", "..", "A", "a-"])
def test_a_namespace_that_kubernetes_would_not_accept(stage, name):
    result = stage.run("gke.sh", "status", "--name=vit-h", f"--namespace={name}")

    assert (result.returncode, stage.calls()) == (2, [])
    assert f"--namespace={name}: must be" in result.stderr


def test_one_command_from_the_manifest_to_the_end(stage):
    stage.answers("get", "echo /0", "echo /1", "echo /1", "echo Completed/1")
    stage.answers(
        "logs", "echo 'pods are not there yet' >&2; exit 1", "echo step 1", "exit 1", "echo step 2"
    )
    result = stage.run("gke.sh", "run", *TPU, "--namespace=team", "--poll_seconds=0", *WORDS)

    assert result.returncode == 0, result.stderr
    assert result.stdout == "step 1\nstep 2\n"
    assert stage.calls()[:2] == [["vit-jax", *CHECKED], ["vit-jax", *PLANNED]]

    calls = stage.calls("kubectl")
    assert all(call.pop(-2).startswith("--since-time=20") for call in calls[3::2])

    place = ["--namespace=team"]
    assert calls == [["apply", "--filename=-", *place], *[[*LOGS, *place], [*STATE, *place]] * 4]
    assert yaml.safe_load((stage.folder / "applied").read_text()) == render([*TPU, *WORDS])
    assert "no log to follow now" in result.stderr
    assert result.stderr.count("vit-h was restarted (1 so far)") == 1
    assert "vit-h has finished, after 1 restart(s)" in result.stderr


def test_dry_run_prints_exactly_what_is_executed(stage):
    result = stage.run("gke.sh", "run", *TPU, "--dry-run", *WORDS)
    assert stage.calls() == []

    stage.answers("get", "echo Completed/0")
    stage.run("gke.sh", "run", *TPU, *WORDS)
    check, plan, manifest, *lines = result.stdout.splitlines()

    assert shlex.split(manifest) == ["./launch/render_jobset.py", *TPU, *WORDS, "|"]
    assert [shlex.split(line)[1:] for line in (check, plan)] == [CHECKED, PLANNED]
    assert [shlex.split(line) for line in lines] == stage.calls()[2:]


@pytest.mark.parametrize(
    ("machine", "options", "devices", "slices", "workdir", "chips", "topology"),
    [
        (TPU, ["--slices=2"], 512, 2, "gs://bucket", 512, "2*v5e:16x16"),
        (
            TPU,
            ["--accelerator=tpu7x", "--topology=2x2x2"],
            16,
            1,
            "gs://bucket",
            8,
            "",
        ),  # two devices a chip
        (GPU, [], 32, 4, "claim:nfs", 32, "4*h100:8"),  # a node of GPUs is a slice
        (CPU, ["--data_bucket=gs://images"], 2, 1, "gs://bucket", 0, ""),
    ],
)
def test_machines_as_vit_jax_counts_them(
    machine, options, devices, slices, workdir, chips, topology
):
    lines = [
        f"devices {devices}",
        f"slices {slices}",
        "workdir /workdir/runs/h",
        f"mount /workdir {workdir}",
    ]
    lines += [f"chips {chips}", *([f"topology {topology}"] if topology else [])]
    lines += ["mount /data gs://images"] * ("--data_bucket=gs://images" in options)

    assert renderer["render"]([*machine, *options, "--machine", *WORDS]).splitlines() == lines


@pytest.mark.parametrize(
    ("unseen", "found", "message"),
    [
        ("/data/tfds/cifar10", "true", None),
        ("/workdir/runs/before", "true", None),
        ("/data/tfds/cifar10", "exit 1", "gs://images/tfds/cifar10 was looked for and not found"),
        ("/photos", "true", "/photos: the machines of the run do not have this path"),
    ],
)
@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_run_is_checked_before_it_is_submitted(stage, command, unseen, found, message):
    stage.answers("check", f"echo 'not visible from here: {unseen}'")
    stage.answers("ls", found)
    stage.answers("get", "echo Completed/0")
    result = stage.run("gke.sh", command, *TPU, "--data_bucket=gs://images", *WORDS)

    assert stage.calls("vit-jax") == [CHECKED, *([] if message else [PLANNED])]
    assert result.returncode == (2 if message else 0), result.stderr
    assert bool(stage.calls("kubectl")) == (message is None)
    assert (message or "") in result.stderr

    address = {"/data/": "gs://images/tfds/cifar10", "/workd": "gs://bucket/runs/before"}.get(
        unseen[:6]
    )
    assert stage.calls("gcloud") == ([["storage", "ls", address]] if address else [])


def test_a_recipe_that_cannot_start_is_not_submitted(stage):
    stage.answers("check", "echo 'config.optimzer: there is no such field' >&2; exit 2")
    result = stage.run("gke.sh", "submit", *TPU, *WORDS)

    assert result.returncode == 2
    assert "there is no such field" in result.stderr
    assert stage.calls("kubectl") == []


@pytest.mark.parametrize(
    ("options", "verb"),
    [(["--no_check"], "pretrain"), ([], "evaluate"), (["--shares=2"], "study")],
)
def test_what_is_not_checked(stage, options, verb):
    words = ["--", verb, "--config=configs/x.py", "--config.input.data_dir=/data/tfds"]
    result = stage.run("gke.sh", "submit", *TPU, "--data_bucket=gs://images", *options, *words)

    assert result.returncode == 0, result.stderr

    is_run = verb == "pretrain"
    assert ("the recipe is not checked here" in result.stderr) == is_run
    assert stage.calls("gcloud") == [["storage", "ls", "gs://images/tfds"]] * is_run
    assert not stage.calls("vit-jax")


def test_data_that_cannot_be_looked_for_are_named(stage):
    """On a volume of the cluster, and without gcloud."""
    stage.answers(
        "check",
        "echo 'not visible from here: /workdir/weights'",
        "echo 'not visible from here: /data/tfds'",
    )
    result = stage.run("gke.sh", "submit", *GPU, *WORDS)

    assert result.returncode == 0, result.stderr
    assert "/workdir/weights is on the volume claim:nfs and is not looked for" in result.stderr

    programs = stage.folder / "bin"
    programs.mkdir()
    for name in (
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
    ):
        (programs / name).symlink_to(shutil.which(name) or "/bin/true")

    (programs / "python3").symlink_to(sys.executable)
    (programs / "kubectl").symlink_to("/bin/true")
    result = stage.run(
        "gke.sh", "submit", *TPU, "--data_bucket=gs://images", *WORDS, PATH=str(programs)
    )

    assert result.returncode == 0, result.stderr
    assert "gcloud is not installed here: gs://images/tfds is not looked for" in result.stderr


@pytest.mark.parametrize(
    ("words", "play", "code", "message"),
    [
        (["log", "--name=vit-h", "--no_check"], {}, 2, "--no_check is of run and submit"),
        (["log", "--name=vit-h", "--price=2"], {}, 2, "--price is of run and submit"),
        (
            ["log", "--name=vit-h"],
            {"get": "echo Failed/3"},
            1,
            "vit-h has failed, after 3 restart(s)",
        ),
        (["log", "--name=vit-h"], {"get": "true"}, 1, "there is no JobSet vit-h"),
        (
            ["log", "--name=vit-h", "--poll_seconds=0"],
            {"get": "echo 'timed out' >&2; exit 1"},
            1,
            "cost money",
        ),
        (["run", *TPU, *WORDS], {"apply": "exit 1"}, 1, "JobSet 0.10 or newer is not installed"),
        (["run", *TPU, "--topology=3x3", *WORDS], {"apply": "exit 99"}, 2, "--topology=3x3"),
    ],
)
def test_runs_that_fail(stage, words, play, code, message):
    for kind, script in play.items():
        later = {"echo Failed/3": ["echo 'jobset failed: mistake'"]}.get(script, [])
        stage.answers(kind, script, *later)

    result = stage.run("gke.sh", *words)

    assert result.returncode == code
    assert message in result.stderr
    assert ("jobset failed: mistake" in result.stderr) == ("has failed" in message)
    assert (stage.calls() == []) == (code == 2)


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
