#!/usr/bin/env python3
"""Fills in gke_jobset.yaml: checks names, accelerator and topology, counts slices and hosts, prints the manifest.

Needs only Python's standard library and contacts no cluster.
"""

import argparse
import json
import math
import re
import string
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

TEMPLATE = Path(__file__).resolve().with_name("gke_jobset.yaml")
FLAT = 2
SOLID = 3  # dimensions of a slice's torus
TPUS = {
    "tpu-v4-podslice": SOLID,
    "tpu-v5-lite-podslice": FLAT,
    "tpu-v5p-slice": SOLID,
    "tpu-v6e-slice": FLAT,
    "tpu7x": SOLID,
}
FLAT_TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_SOLID_TOPOLOGIES = (
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
)  # larger ones: every side a multiple of 4
JOB = "worker"
POD_NAME_LENGTH = 63  # of the longest name made from ours: NAME-worker-SLICE-HOST-abcde
SHARED_VERBS = (
    "study",
    "sweep",
    "vtab",
)  # whose runs --index= and --count= deal to several machines
WORKDIR = "/workdir"
DATA = "/data"
LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}([.]{LABEL})*"  # names of accounts and claims
IMAGE = "[a-zA-Z0-9]+([-._:/@]+[a-zA-Z0-9]+)*"
FOLDER_LETTERS = "-a-zA-Z0-9._=+@,"
PLANNED = {  # kinds of `vit-jax plan --topology=`
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "nvidia-h100-80gb": "h100",
    "nvidia-tesla-a100": "a100-40gb",
    "nvidia-a100-80gb": "a100-80gb",
}
DEVICES_PER_CHIP = {"tpu7x": 2}  # as JAX counts them; of the others one


def main(words: Sequence[str] | None = None) -> None:
    """Prints the manifest, or one message with exit code 2."""
    try:
        print(render(words), end="")
    except ValueError as error:
        print(f"render_jobset.py: {error}", file=sys.stderr)
        sys.exit(2)


def render(words: Sequence[str] | None = None) -> str:
    """Return the manifest for these words of the command line; with shares one for each, as documents of one file.

    Raises:
      ValueError: a name, accelerator, topology or workdir that Kubernetes or the run would not
        accept.
    """
    options = _parser().parse_args(words)
    values = _values(options)
    if options.machine:
        return _machine(options, values)
    cases = {_kind(options)} | {case for case in ("spot", "pull") if getattr(options, case)}
    cases |= {"account"} if options.service_account else set()
    cases |= {"bucket"} if options.workdir.startswith("gs://") else {"claim"}
    cases |= {"data"} if options.data_bucket else set()
    cases |= {"limit"} if options.max_hours is not None else set()
    template = TEMPLATE.read_text()
    if options.shares is None:
        return fill(template, values, cases)
    return "---\n".join(
        fill(template, _share(values, index, options.shares), cases)
        for index in range(options.shares)
    )


def _machine(options: argparse.Namespace, values: Mapping[str, object]) -> str:
    """Return what gke.sh checks a run with, a line each.

    Devices and slices as JAX counts them, workdir, mounts, chips of all shares, the topology's name
    in `vit-jax plan`.
    """
    kind = _kind(options)
    nodes = options.slices * values["parallelism"]
    per_node = DEVICES_PER_CHIP.get(options.accelerator, 1) * (values["chips_per_host"] or 1)  # type: ignore[operator]
    slices = {"tpu": options.slices, "gpu": nodes, "cpu": 1}[kind]
    place, _ = _place(options.workdir, options.dry_run)
    volume = (
        f"gs://{values['bucket']}"
        if options.workdir.startswith("gs://")
        else f"claim:{values['claim']}"
    )
    lines = [
        f"devices {nodes * per_node}",
        f"slices {slices}",
        f"workdir {place}",
        f"mount {WORKDIR} {volume}",
    ]
    lines.append(f"chips {nodes * values['chips_per_host'] * (options.shares or 1)}")  # type: ignore[operator]
    if planned := PLANNED.get(options.accelerator):
        count, shape = (
            (slices, options.topology) if kind == "tpu" else (nodes, options.chips_per_host)
        )
        lines.append(f"topology {count}*{planned}:{shape}")
    if options.data_bucket is not None:
        lines.append(f"mount {DATA} gs://{values['data_bucket']}")
    return "\n".join(lines) + "\n"


def _share(values: Mapping[str, object], index: int, count: int) -> dict[str, object]:
    """A JobSet of its own: that of another share neither restarts it nor is waited for."""
    words = [*values["arguments"], f"--index={index}", f"--count={count}"]  # type: ignore[misc]
    return {**values, "name": f"{values['name']}-{index}", "arguments": words}


def fill(template: str, values: Mapping[str, object], cases: Collection[str]) -> str:
    """Drops comments and the lines whose cases do not hold, and puts the values in as JSON, which is YAML."""
    lines = []
    for line in template.splitlines():
        text, _, only = line.partition("# only: ")
        if only and not set(only.split()) & set(cases):
            continue
        text = re.sub(r"(^| )#.*", "", text).rstrip()
        if text:
            lines.append(text)
    quoted = {name: json.dumps(value) for name, value in values.items()}
    return string.Template("\n".join(lines) + "\n").substitute(quoted)


def hosts_and_chips(accelerator: str, topology: str, chips_per_host: int | None) -> tuple[int, int]:
    """Hosts of a TPU slice, and chips of each, from its topology.

    Raises:
      ValueError: a topology that this accelerator does not have, or chips that do not divide into
        hosts.
    """
    dims = TPUS[accelerator]
    sides = (
        [int(side) for side in topology.split("x")] if re.fullmatch(r"\d+(x\d+)*", topology) else []
    )
    if dims == FLAT and topology not in FLAT_TOPOLOGIES:
        raise ValueError(f"--topology={topology}: {accelerator} has {', '.join(FLAT_TOPOLOGIES)}.")
    is_large = (
        len(sides) == SOLID
        and all(side and side % 4 == 0 for side in sides)
        and sides == sorted(sides)
    )
    if dims == SOLID and topology not in SMALL_SOLID_TOPOLOGIES and not is_large:
        raise ValueError(
            f"--topology={topology}: {accelerator} has {', '.join(SMALL_SOLID_TOPOLOGIES)}, and AxBxC of multiples "
            "of 4, the smallest first."
        )
    chips = math.prod(sides)
    if chips_per_host is None:
        if topology == "2x4":
            raise ValueError(
                "--topology=2x4 is one host of 8 chips or two hosts of 4, by the machine type of the node pool: say "
                "--chips_per_host=8 (…-8t) or --chips_per_host=4 (…-4t)."
            )
        chips_per_host = min(chips, 4)
    if (
        chips_per_host not in (1, 4, 8)
        or chips % chips_per_host
        or (chips_per_host != 4 and chips != chips_per_host)
    ):
        raise ValueError(
            f"--chips_per_host={chips_per_host}: hosts of a {topology} slice have {min(chips, 4)} chips."
        )
    return chips // chips_per_host, chips_per_host


def _kind(options: argparse.Namespace) -> str:
    if options.accelerator in TPUS:
        return "tpu"
    if options.accelerator == "cpu":
        return "cpu"
    if (
        re.fullmatch(f"nvidia-{LABEL}", options.accelerator)
        and len(options.accelerator) <= POD_NAME_LENGTH
    ):
        return "gpu"
    raise ValueError(
        f"--accelerator={options.accelerator!r}: must be cpu, nvidia-... as GKE names the GPU, or one of "
        f"{', '.join(TPUS)}."
    )


def _values(options: argparse.Namespace) -> dict[str, object]:
    kind = _kind(options)
    if kind == "tpu":
        if options.hosts is not None or options.topology is None:
            raise ValueError(
                "a TPU slice is given by --topology (like 16x16), from which its hosts are counted."
            )
        hosts, chips = hosts_and_chips(
            options.accelerator, options.topology, options.chips_per_host
        )
    else:
        if options.topology is not None:
            raise ValueError(
                f"--topology={options.topology} is of TPUs; give --hosts for {options.accelerator}."
            )
        if kind == "cpu" and options.chips_per_host is not None:
            raise ValueError(
                f"--chips_per_host={options.chips_per_host}: there are none with --accelerator=cpu."
            )
        if kind == "gpu" and options.chips_per_host is None:
            raise ValueError(
                "--chips_per_host is needed with GPUs: how many a node of the pool has."
            )
        hosts = options.hosts or 1
        chips = options.chips_per_host or 0
    _check_counts(options)
    _check_words(options)
    last = "" if options.shares is None else f"-{options.shares - 1}"
    _check_name(options.name, options.slices, hosts, last)
    workdir, claim = _place(options.workdir, options.dry_run)
    return {
        "name": options.name,
        "job": JOB,
        "max_failures": options.max_failures,
        "replicas": options.slices,
        "parallelism": hosts,
        "chips_per_host": chips,
        "grace_seconds": options.grace_seconds,
        "limit_seconds": None if options.max_hours is None else int(3600 * options.max_hours),
        "accelerator": options.accelerator,
        "topology": options.topology,
        "image": options.image,
        "service_account": options.service_account,
        "cpus": options.cpus,
        "memory": options.memory,
        "bucket": claim,
        "claim": claim,
        "data_bucket": _data_bucket(options),
        "cache_mb": 1024 * options.cache_gib,
        # Kubernetes would replace $(NAME) in an argument, and $$ is how it writes a dollar.
        "arguments": [word.replace("$", "$$") for word in _words(options)]
        + [f"--workdir={workdir}"],
    }


def _words(options: argparse.Namespace) -> list[str]:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise ValueError("give the command to run after --: ... -- pretrain --config=RECIPE")
    for word in words:
        if word.startswith("--workdir"):
            raise ValueError(f"{word} follows --: give --workdir=gs://BUCKET/FOLDER before it.")
    if options.shares is not None and words[0] not in SHARED_VERBS:
        raise ValueError(
            f"--shares={options.shares}: {words[0]} is one run; {', '.join(SHARED_VERBS)} have several."
        )
    return words


def _check_counts(options: argparse.Namespace) -> None:
    least_counts = {
        "slices": 1,
        "hosts": 1,
        "shares": 1,
        "max_failures": 0,
        "grace_seconds": 1,
        "cache_gib": 0,
    }
    for name, least in least_counts.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more.")
    if options.max_hours is not None and not 1 <= 3600 * options.max_hours < math.inf:
        raise ValueError(
            f"--max_hours={options.max_hours}: must be a number of hours, of one second at least."
        )


def _check_words(options: argparse.Namespace) -> None:
    quantity = (
        r"[0-9]+(\.[0-9]+)?(m|[KMGTPE]i|[kMGTPE])?",
        "a quantity of Kubernetes, like 4, 500m or 16Gi",
    )
    account = (
        SUBDOMAIN,
        "lower-case letters, digits, hyphens and single dots, with a letter or digit at both ends",
    )
    image = (IMAGE, "REGISTRY/NAME:TAG, of letters, digits and . _ - : / @")
    checks = {"cpus": quantity, "memory": quantity, "service_account": account, "image": image}
    for name, (pattern, kind) in checks.items():
        value = getattr(options, name)
        if value is not None and (not re.fullmatch(pattern, value) or re.search(r"\.\.|//", value)):
            raise ValueError(f"--{name}={value!r}: must be {kind}.")


def _check_name(name: str, slices: int, hosts: int, share: str) -> None:
    longest = POD_NAME_LENGTH - len(f"{share}-{JOB}-{slices - 1}-{hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise ValueError(
            f"--name={name}: must be at most {longest} lower-case letters, digits and hyphens, a letter first and no "
            "hyphen last."
        )


def _data_bucket(options: argparse.Namespace) -> str | None:
    if options.data_bucket is None:
        return None
    return _bucket("data_bucket", options.data_bucket, is_placeholder=options.dry_run)


def _place(workdir: str, is_dry_run: bool) -> tuple[str, str]:
    """Where the run finds its workdir, and the bucket or claim that is mounted for it."""
    bucket = re.fullmatch(r"gs://([^/]+)/(.+?)/?", workdir)
    claim = re.fullmatch(rf"claim:({SUBDOMAIN})/(.+?)/?", workdir)
    if bucket:
        name = _bucket("workdir", f"gs://{bucket[1]}", is_placeholder=is_dry_run)
        return f"{WORKDIR}/{_folder(workdir, bucket[2])}", name
    if claim:
        return f"{WORKDIR}/{_folder(workdir, claim.groups()[-1])}", claim[1]
    raise ValueError(
        f"--workdir={workdir}: must be gs://BUCKET/FOLDER, or claim:NAME/FOLDER of a persistent volume claim "
        "(ReadWriteMany): all processes write into it, and it outlives them."
    )


def _folder(workdir: str, folder: str) -> str:
    """Return the folder, which stays below its mount and which neither Kubernetes nor a shell expands."""
    if any(
        part in (".", "..") or not re.fullmatch(f"[{FOLDER_LETTERS}]+", part)
        for part in folder.split("/")
    ):
        raise ValueError(
            f"--workdir={workdir}: parts of the folder must be of letters, digits and . _ = + @ , - and none may be "
            ". or .. or empty."
        )
    return folder


def _bucket(option: str, address: str, *, is_placeholder: bool = False) -> str:
    """The name of a bucket; of one to be named, in capitals as in the README, where nothing is submitted."""
    letters = "a-zA-Z0-9" if is_placeholder else "a-z0-9"
    match = re.fullmatch(rf"gs://([{letters}][-{letters}_.]{{1,61}}[{letters}])", address)
    if not match or ".." in address:
        raise ValueError(
            f"--{option}={address}: must name a bucket, like gs://my-bucket: yours, in the place of BUCKET or IMAGES."
        )
    return match[1]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{message} (--help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="render_jobset.py",
        description="Prints the manifest of a run as a Kubernetes JobSet. What follows -- are the words for vit-jax.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="of the JobSet")
    add(
        "--image",
        required=True,
        help="made from launch/Dockerfile, in a registry that the cluster can read",
    )
    add("--accelerator", required=True, help=f"cpu, nvidia-... or one of {', '.join(TPUS)}")
    add(
        "--workdir",
        required=True,
        help="gs://BUCKET/FOLDER, or claim:NAME/FOLDER of a persistent volume claim",
    )
    add("--topology", help="of a TPU slice, like 16x16 or 4x4x8")
    add("--slices", type=int, default=1, help="TPU slices, or groups of --hosts nodes (default 1)")
    add(
        "--shares",
        type=int,
        help="JobSets NAME-0, NAME-1, ... that share the runs of a study, sweep or vtab",
    )
    add("--hosts", type=int, help="nodes with GPUs or CPUs in a group (default 1)")
    add(
        "--chips_per_host",
        type=int,
        help="GPUs of a node; chips of a TPU host where the topology leaves it open",
    )
    add("--data_bucket", help="gs://BUCKET, mounted read-only at /data")
    add(
        "--cache_gib",
        type=int,
        default=50,
        help="of a node's disk, for files of --data_bucket (default 50, 0: none)",
    )
    add("--service_account", help="Kubernetes' account that may use the buckets")
    add("--cpus", default="4", help="asked for with --accelerator=cpu (default 4)")
    add("--memory", default="16Gi", help="asked for with --accelerator=cpu (default 16Gi)")
    add(
        "--max_failures",
        type=int,
        default=3,
        help="restarts after failures; preemptions do not count (default 3)",
    )
    add("--grace_seconds", type=int, default=300, help="from SIGTERM to SIGKILL (default 300)")
    add(
        "--max_hours",
        type=float,
        help="from each start, waiting for nodes included; then the run saves and stops",
    )
    add("--spot", action="store_true", help="only nodes of spot pools")
    add(
        "--pull",
        action="store_true",
        help="load the image anew at every start, for a tag that moves",
    )
    add(
        "--dry-run",
        action="store_true",
        help="take BUCKET and the like, in capitals, for names to be given",
    )
    add(
        "--machine",
        action="store_true",
        help="print devices, slices, workdir and mounts in place of the manifest",
    )
    add("words", nargs=argparse.REMAINDER, help="-- VERB ARGUMENTS of vit-jax")
    return parser


if __name__ == "__main__":
    main()
