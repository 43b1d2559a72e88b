#!/usr/bin/env python3
"""Fills in gke_jobset.yaml: checks names, accelerator and topology, prints the manifest.

It needs only Python's standard library and contacts no cluster.
"""

import argparse
import json
import math
import re
import string
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().with_name("gke_jobset.yaml")
FLAT = 2
SOLID = 3
"""Dimensions of the torus of a slice."""
TPUS = {
    "tpu-v4-podslice": SOLID,
    "tpu-v5-lite-podslice": FLAT,
    "tpu-v5p-slice": SOLID,
    "tpu-v6e-slice": FLAT,
    "tpu7x": SOLID,
}
FLAT_TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_SOLID_TOPOLOGIES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""Topologies below 4x4x4; the sides of larger ones are multiples of 4."""
JOB = "worker"
POD_NAME_LENGTH = 63
"""Length of the longest name that is made from --name: NAME-worker-SLICE-HOST-abcde."""
SHARED_VERBS = ("study", "sweep", "vtab")
"""Verbs with several runs, which --index= and --count= deal to several machines."""
WORKDIR = "/workdir"
DATA = "/data"
LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}([.]{LABEL})*"
"""Names of accounts and claims."""
IMAGE = "[a-zA-Z0-9]+([-._:/@]+[a-zA-Z0-9]+)*"
LABEL_NAME = "[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
"""Name of a label of Kubernetes, also its value."""
FOLDER_LETTERS = "-a-zA-Z0-9._=+@,"
PLANNED = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "nvidia-h100-80gb": "h100",
    "nvidia-tesla-a100": "a100-40gb",
    "nvidia-a100-80gb": "a100-80gb",
}
"""Kinds of `vit-jax plan --topology=` by accelerator."""
DEVICES_PER_CHIP = {"tpu7x": 2}
"""Devices of a chip as JAX counts them; one for other accelerators."""


def main(words: Sequence[str] | None = None) -> None:
    """Print the manifest, or one message with exit code 2."""
    try:
        print(render(words), end="")
    except ValueError as error:
        print(f"render_jobset.py: {error}", file=sys.stderr)
        sys.exit(2)


def render(words: Sequence[str] | None = None) -> str:
    """Return the manifest for these words of the command line.

    With shares, it is a document for each.

    Raises:
      ValueError: a name, accelerator, topology or workdir that Kubernetes or the run would not
        accept.
    """
    options = _build_parser().parse_args(words)
    values = _read_values(options)
    if options.machine:
        return _describe_machine(options, values)
    cases = _list_cases(options)
    template = TEMPLATE.read_text()
    if options.shares is None:
        return fill(template, values, cases)
    documents = []
    for index in range(options.shares):
        documents.append(fill(template, _set_share(values, index, options.shares), cases))
    return "---\n".join(documents)


def _list_cases(options: argparse.Namespace) -> set[str]:
    """Return the cases of the template that hold."""
    is_bucket = options.workdir.startswith("gs://")
    holds = {
        _find_kind(options): True,
        "spot": options.spot,
        "pull": options.pull,
        "account": options.service_account,
        "bucket": is_bucket,
        "claim": not is_bucket,
        "data": options.data_bucket,
        "limit": options.max_hours is not None,
        "labels": options.label,
    }
    return {case for case, is_true in holds.items() if is_true}


def _describe_machine(options: argparse.Namespace, values: Mapping[str, Any]) -> str:
    """Return a line for each fact by which gke.sh checks a run.

    They are: devices and slices as JAX counts them, workdir, mounts, chips of all shares, and the
    topology's name in `vit-jax plan`.
    """
    nodes = options.slices * values["parallelism"]
    chips = values["chips_per_host"]
    devices_per_node = DEVICES_PER_CHIP.get(options.accelerator, 1) * (chips or 1)
    kind = _find_kind(options)
    slices = {"tpu": options.slices, "gpu": nodes, "cpu": 1}[kind]
    volume = f"claim:{values['claim']}"
    if options.workdir.startswith("gs://"):
        volume = f"gs://{values['bucket']}"
    workdir, _ = _find_workdir(options.workdir, options.dry_run)

    lines = [
        f"devices {nodes * devices_per_node}",
        f"slices {slices}",
        f"workdir {workdir}",
        f"mount {WORKDIR} {volume}",
        f"chips {nodes * chips * (options.shares or 1)}",
    ]
    planned = PLANNED.get(options.accelerator)
    if planned and kind == "tpu":
        lines.append(f"topology {slices}*{planned}:{options.topology}")
    elif planned:
        lines.append(f"topology {nodes}*{planned}:{options.chips_per_host}")
    if options.data_bucket is not None:
        lines.append(f"mount {DATA} gs://{values['data_bucket']}")
    return "\n".join(lines) + "\n"


def _set_share(values: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return the values of a JobSet for one share; other shares neither restart nor await it."""
    words = [*values["arguments"], f"--index={index}", f"--count={count}"]
    return {**values, "name": f"{values['name']}-{index}", "arguments": words}


def fill(template: str, values: Mapping[str, Any], cases: Collection[str]) -> str:
    """Return the template with the values as JSON, which is YAML.

    Comments and lines whose cases do not hold are dropped.
    """
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


def count_hosts_and_chips(
    accelerator: str, topology: str, chips_per_host: int | None
) -> tuple[int, int]:
    """Return the number of hosts of a TPU slice, and of chips of each, from its topology.

    Raises:
      ValueError: a topology that this accelerator does not have, or chips that do not divide into
        hosts.
    """
    if TPUS[accelerator] == FLAT:
        _require_flat(accelerator, topology)
    else:
        _require_solid(accelerator, topology)
    chips = math.prod(map(int, topology.split("x")))
    if chips_per_host is None:
        if topology == "2x4":
            raise ValueError(
                "--topology=2x4 is one host of 8 chips or two hosts of 4, by the machine type of "
                "the node pool: say --chips_per_host=8 (…-8t) or --chips_per_host=4 (…-4t)."
            )
        chips_per_host = min(chips, 4)

    is_single_host = chips == chips_per_host
    has_hosts_of_4 = chips_per_host == 4 and chips % 4 == 0
    if chips_per_host not in (1, 4, 8) or not (is_single_host or has_hosts_of_4):
        raise ValueError(
            f"--chips_per_host={chips_per_host}: hosts of a {topology} slice have "
            f"{min(chips, 4)} chips."
        )
    return chips // chips_per_host, chips_per_host


def _require_flat(accelerator: str, topology: str) -> None:
    if topology not in FLAT_TOPOLOGIES:
        raise ValueError(f"--topology={topology}: {accelerator} has {', '.join(FLAT_TOPOLOGIES)}.")


def _require_solid(accelerator: str, topology: str) -> None:
    """Raise ValueError unless a topology is a small one, or has ascending multiples of 4."""
    if topology in SMALL_SOLID_TOPOLOGIES:
        return
    if re.fullmatch(r"\d+x\d+x\d+", topology):
        sides = [int(side) for side in topology.split("x")]
        are_multiples = all(side > 0 and side % 4 == 0 for side in sides)
        if are_multiples and sides == sorted(sides):
            return
    raise ValueError(
        f"--topology={topology}: {accelerator} has {', '.join(SMALL_SOLID_TOPOLOGIES)}, "
        "and AxBxC of multiples of 4, the smallest first."
    )


def _find_kind(options: argparse.Namespace) -> str:
    """Return "tpu", "gpu" or "cpu"."""
    accelerator = options.accelerator
    if accelerator in TPUS:
        return "tpu"
    if accelerator == "cpu":
        return "cpu"
    if re.fullmatch(f"nvidia-{LABEL}", accelerator) and len(accelerator) <= POD_NAME_LENGTH:
        return "gpu"
    raise ValueError(
        f"--accelerator={accelerator!r}: must be cpu, nvidia-... as GKE names the GPU, or one of "
        f"{', '.join(TPUS)}."
    )


def _count_machines(options: argparse.Namespace) -> tuple[int, int]:
    """Return the number of hosts of a slice or group, and of chips of each."""
    kind = _find_kind(options)
    chips_per_host = options.chips_per_host
    if kind == "tpu":
        if options.hosts is not None or options.topology is None:
            raise ValueError(
                "a TPU slice is given by --topology (like 16x16), from which its hosts are counted."
            )
        return count_hosts_and_chips(options.accelerator, options.topology, chips_per_host)
    if options.topology is not None:
        raise ValueError(
            f"--topology={options.topology} is of TPUs; give --hosts for {options.accelerator}."
        )
    if kind == "cpu" and chips_per_host is not None:
        raise ValueError(
            f"--chips_per_host={chips_per_host}: there are none with --accelerator=cpu."
        )
    if kind == "gpu" and chips_per_host is None:
        raise ValueError("--chips_per_host is needed with GPUs: how many a node of the pool has.")
    return options.hosts or 1, chips_per_host or 0


def _read_values(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the template, after all options are checked."""
    hosts, chips = _count_machines(options)
    _check_counts(options)
    _check_words(options)
    last_share = ""
    if options.shares is not None:
        last_share = f"-{options.shares - 1}"
    _check_name(options.name, options.slices, hosts, last_share)
    limit_seconds = None
    if options.max_hours is not None:
        limit_seconds = int(3600 * options.max_hours)
    workdir, volume = _find_workdir(options.workdir, options.dry_run)
    data_bucket = _read_data_bucket(options)
    # Kubernetes would replace $(NAME) in an argument, and $$ is how it writes a dollar.
    words = [word.replace("$", "$$") for word in _read_words(options)]
    return {
        "name": options.name,
        "labels": _read_labels(options.label),
        "job": JOB,
        "max_failures": options.max_failures,
        "replicas": options.slices,
        "parallelism": hosts,
        "chips_per_host": chips,
        "grace_seconds": options.grace_seconds,
        "limit_seconds": limit_seconds,
        "accelerator": options.accelerator,
        "topology": options.topology,
        "image": options.image,
        "service_account": options.service_account,
        "cpus": options.cpus,
        "memory": options.memory,
        "bucket": volume,
        "claim": volume,
        "data_bucket": data_bucket,
        "cache_mb": 1024 * options.cache_gib,
        "arguments": [*words, f"--workdir={workdir}"],
    }


def _read_labels(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of labels by their keys.

    Raises:
      ValueError: a text is not KEY=VALUE as Kubernetes allows it, or a key is repeated.
    """
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        prefix, slash, name = key.rpartition("/")
        has_prefix = len(prefix) <= 253 and re.fullmatch(SUBDOMAIN, prefix)
        is_key = re.fullmatch(LABEL_NAME, name) and (has_prefix or not slash)
        if not equals or not is_key or not re.fullmatch(f"({LABEL_NAME})?", value):
            raise ValueError(
                f"--label={text}: must be KEY=VALUE of letters, digits and - _ . with at most 63 in "
                "the value and in the key, which may begin with a domain and /. "
                "Use --label=kueue.x-k8s.io/queue-name=my-queue."
            )
        if key in labels:
            raise ValueError(f"--label={text}: {key} is given twice. Give it once.")
        labels[key] = value
    return labels


def _read_words(options: argparse.Namespace) -> list[str]:
    """Return the words for vit-jax."""
    words = options.words
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError("give the command to run after --: ... -- pretrain --config=RECIPE")
    for word in words:
        if word.startswith("--workdir"):
            raise ValueError(f"{word} follows --: give --workdir=gs://BUCKET/FOLDER before it.")
    if options.shares is not None and words[0] not in SHARED_VERBS:
        raise ValueError(
            f"--shares={options.shares}: {words[0]} is one run; "
            f"{', '.join(SHARED_VERBS)} have several."
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


_QUANTITY = (
    r"[0-9]+(\.[0-9]+)?(m|[KMGTPE]i|[kMGTPE])?",
    "a quantity of Kubernetes, like 4, 500m or 16Gi",
)
_ACCOUNT = (
    SUBDOMAIN,
    "lower-case letters, digits, hyphens and single dots, with a letter or digit at both ends",
)
_IMAGE = (IMAGE, "REGISTRY/NAME:TAG, of letters, digits and . _ - : / @")
FORMS = {"cpus": _QUANTITY, "memory": _QUANTITY, "service_account": _ACCOUNT, "image": _IMAGE}
"""Patterns of options, and their forms in words."""


def _check_words(options: argparse.Namespace) -> None:
    for name, (pattern, form) in FORMS.items():
        value = getattr(options, name)
        if value is None:
            continue
        has_double_signs = re.search(r"\.\.|//", value)
        if has_double_signs or not re.fullmatch(pattern, value):
            raise ValueError(f"--{name}={value!r}: must be {form}.")


def _check_name(name: str, slices: int, hosts: int, share: str) -> None:
    longest = POD_NAME_LENGTH - len(f"{share}-{JOB}-{slices - 1}-{hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise ValueError(
            f"--name={name}: must be at most {longest} lower-case letters, digits and hyphens, "
            "a letter first and no hyphen last."
        )


def _read_data_bucket(options: argparse.Namespace) -> str | None:
    if options.data_bucket is None:
        return None
    return _read_bucket("data_bucket", options.data_bucket, is_placeholder=options.dry_run)


def _find_workdir(workdir: str, is_dry_run: bool) -> tuple[str, str]:
    """Return the workdir as the run finds it, and the bucket or claim that is mounted for it."""
    if match := re.fullmatch(r"gs://([^/]+)/(.+?)/?", workdir):
        bucket = _read_bucket("workdir", f"gs://{match[1]}", is_placeholder=is_dry_run)
        _check_folder(workdir, match[2])
        return f"{WORKDIR}/{match[2]}", bucket
    if match := re.fullmatch(rf"claim:(?P<claim>{SUBDOMAIN})/(?P<folder>.+?)/?", workdir):
        _check_folder(workdir, match["folder"])
        return f"{WORKDIR}/{match['folder']}", match["claim"]
    raise ValueError(
        f"--workdir={workdir}: must be gs://BUCKET/FOLDER, or claim:NAME/FOLDER of a persistent "
        "volume claim (ReadWriteMany): all processes write into it, and it outlives them."
    )


def _check_folder(workdir: str, folder: str) -> None:
    """Raise ValueError for a folder outside of its mount, or that Kubernetes or a shell expands."""
    for part in folder.split("/"):
        if part in (".", "..") or not re.fullmatch(f"[{FOLDER_LETTERS}]+", part):
            raise ValueError(
                f"--workdir={workdir}: parts of the folder must be of letters, digits and "
                ". _ = + @ , - and none may be . or .. or empty."
            )


def _read_bucket(option: str, address: str, *, is_placeholder: bool = False) -> str:
    """Return the name of a bucket.

    A dry run accepts capitals, as in the placeholders of the README.
    """
    letters = "a-zA-Z0-9" if is_placeholder else "a-z0-9"
    match = re.fullmatch(rf"gs://([{letters}][-{letters}_.]{{1,61}}[{letters}])", address)
    if not match or ".." in address:
        raise ValueError(
            f"--{option}={address}: must name a bucket, like gs://my-bucket: "
            "yours, in the place of BUCKET or IMAGES."
        )
    return match[1]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{message} (--help lists the options)")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="render_jobset.py",
        description=(
            "Prints the manifest of a run as a Kubernetes JobSet. "
            "What follows -- are the words for vit-jax."
        ),
        allow_abbrev=False,
    )
    _add_machine_options(parser)
    _add_run_options(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="-- VERB ARGUMENTS of vit-jax")
    return parser


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
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


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
    add(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the JobSet, like kueue.x-k8s.io/queue-name=my-queue; may be repeated",
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


if __name__ == "__main__":
    main()
