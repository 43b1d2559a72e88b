"""Suites of tasks: the 19 of VTAB-1k with the paper's results, or a custom list."""

import dataclasses

from vit_jax.data.kinds import vtab_tasks
from vit_jax.imports.references import resolve
from vit_jax.text.nearest import require_known

PUBLISHED = ("ViT-H/14, JFT-300M", "ViT-L/16, JFT-300M", "ViT-L/16, ImageNet-21k")
"""Model and pre-training data of the columns of the paper's Table 9."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A dataset to fine-tune on and to test on.

    Attributes:
      name: name of the task, and of its folder.
      group: name of the group; the table has a mean for each group.
      data: dataset, as in a recipe: "vtab:pets", "digits", "folder:PATH", "csv:FILE" or
        "package.module:name".
      train, validation: splits of `data`: each setting is trained on the first and compared on the
        second.
      train_and_validation, test: splits of the final run.
      flip, crop: True if training may mirror, and crop, the images.
      published: top-1 accuracies of the paper in percent, in the order of `PUBLISHED`; () without
        any.
    """

    name: str
    group: str
    data: str
    train: str = "train800"
    validation: str = "val200"
    train_and_validation: str = "train800val200"
    test: str = "test"
    flip: bool = True
    crop: bool = True
    published: tuple[float, ...] = ()


_TABLE_9 = {
    "caltech101": (95.3, 95.4, 90.8),
    "cifar100": (85.5, 81.9, 84.1),
    "dtd": (75.2, 74.3, 74.1),
    "flowers102": (99.7, 99.7, 99.3),
    "pets": (97.2, 96.7, 92.7),
    "sun397": (65.0, 63.5, 61.0),
    "svhn": (88.9, 87.4, 80.9),
    "camelyon": (83.3, 83.6, 82.5),
    "eurosat": (96.7, 96.5, 95.6),
    "resisc45": (91.4, 89.7, 85.2),
    "retinopathy": (76.6, 77.1, 75.3),
    "clevr_count": (91.7, 86.4, 70.3),
    "clevr_distance": (63.8, 63.1, 56.1),
    "dmlab": (53.1, 49.7, 41.9),
    "dsprites_location": (79.4, 74.5, 74.7),
    "dsprites_orientation": (63.3, 60.5, 64.9),
    "kitti_distance": (84.5, 82.2, 79.9),
    "smallnorb_azimuth": (33.2, 36.2, 30.5),
    "smallnorb_elevation": (51.2, 51.1, 41.7),
}


def _build_vtab() -> tuple[Task, ...]:
    """Return the tasks of VTAB-1k with the paper's results."""
    tasks = []
    for task in vtab_tasks.TASKS:
        tasks.append(
            Task(
                name=task.name,
                group=task.group,
                data=f"vtab:{task.name}",
                flip=task.flip,
                crop=task.crop,
                published=_TABLE_9[task.name],
            )
        )
    return tuple(tasks)


VTAB = _build_vtab()
_NO_FOLDERS = ("", ".", "..", "all")  # names that no task can have


def load_suite(reference: str | None) -> tuple[Task, ...]:
    """Return VTAB's tasks, or the list of `Task` that a reference "package.module:name" names.

    Raises:
      ValueError: it cannot be imported, is no such list, or two tasks have one name.
    """
    if reference is None:
        return VTAB
    tasks = resolve(reference, "--suite")
    is_list = isinstance(tasks, (list, tuple)) and len(tasks) > 0
    if not is_list or not all(isinstance(task, Task) for task in tasks):
        raise ValueError(f"--suite={reference}: must be a list of vit_jax.tools.sweeps.suite.Task.")
    for task in tasks:
        if len(task.published) not in (0, len(PUBLISHED)):
            raise ValueError(
                f"--suite={reference}: {task.name!r} has other than {len(PUBLISHED)} published "
                "results, or none."
            )
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1 or "/" in name or name in _NO_FOLDERS:
            raise ValueError(
                f"--suite={reference}: {name!r} names two tasks, or cannot name a folder."
            )
    return tuple(tasks)


def select_tasks(suite: tuple[Task, ...], words: str) -> tuple[Task, ...]:
    """Return tasks by names and groups with commas between them, in the order of the suite.

    "all" stands for all tasks.

    Raises:
      ValueError: there is no such task or group; the nearest is named.
    """
    names = [task.name for task in suite]
    groups = dict.fromkeys(task.group for task in suite)
    known = ["all", *groups, *names]
    selected = words.split(",")
    for word in selected:
        require_known("--tasks", word, known)
    if "all" in selected:
        return suite
    return tuple(task for task in suite if task.name in selected or task.group in selected)
