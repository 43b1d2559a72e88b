"""The command line: one subcommand is one verb. Verbs import what they need, so that help is fast."""

import difflib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from vit_jax.cli import analysis, planning, runs, training, transfer, vtab, weights
from vit_jax.cli.words import fail

HELP = """\
vit-jax: train Vision Transformers in JAX.

  vit-jax pretrain --config=RECIPE[:ARGUMENT] --workdir=FOLDER [--config.SECTION.FIELD=VALUE ...]
      Train from scratch, or resume from the workdir's last checkpoint.
  vit-jax finetune --config=RECIPE[:ARGUMENT] --workdir=FOLDER --config.init_from=WEIGHTS [--config.… ...]
      Fine-tune weights (a workdir, .npz, .safetensors) on other images, or resume an interrupted run.
  vit-jax evaluate CHECKPOINT --data=DATA [--split=NAME] [--classes=A,B] [--report=FOLDER] [--csv=FILE] [--json]
      Top-1 and top-5 with intervals, loss, calibration and speed of weights in any format on a labelled dataset; as a
      report also tables of classes and images, confusions and pictures. Data that the weights were trained on are split
      as in training. Of other data the split "test" is evaluated, or all of a folder without split sub-folders
      (--split=all), unless --holdout_fraction= or --seed= selects a hold-out. Further --data_dir=FOLDER,
      --train_split=, --global_batch=, --max_unreadable=, --raw.
  vit-jax evaluate CHECKPOINT --data=imagenet[:NAME,...] --data_dir=FOLDER [--real=real.json]
      The same for those of ImageNet's validation, ReaL, V2, -A, -R, Sketch and ObjectNet that are there: one table.
  vit-jax fewshot CHECKPOINT --data=DATA,... [--shots=1,5,10,25] [--seeds=0,1,2] [--l2=1024] [--sampling=random|first]
      Accuracy of a linear classifier in closed form on the frozen features of a few images of each class.
  vit-jax probe CHECKPOINT --data=DATA,... [--method=logistic|least_squares] [--penalty=P]
      The same on all training images: logistic regression (its penalty searched on a held-out part) or closed form.
  vit-jax knn CHECKPOINT --data=DATA,... [--neighbours=10,20,100] [--temperature=0.07]
      Accuracy of the nearest neighbours among the training images, by the cosine similarity of features.
  vit-jax features CHECKPOINT --data=DATA --output=FILE.npz [--split=test]
      The features themselves, with labels and names.
      All four: DATA is that of a recipe, or caltech101, cars196, cifar100, dtd, pets, uc_merced, imagenet (released
      for all seven); --train_split=, --test_split= (not of features), --classes=A,B, --data_dir=, --layer=pre_logits|
      pooled|token|mean|block:N|stage:N, --preprocessing=fewshot|own, --cache=FOLDER|none, --global_batch=,
      --max_unreadable=, --json.
  vit-jax vtab WEIGHTS --tasks=all|GROUP|NAME,... --workdir=FOLDER [--data_dir=FOLDER] [--available] [--dry-run]
      Fine-tune on each task of VTAB-1k (natural, specialized, structured; 19 in all) and test it: settings tried on 800
      images and compared on 200, by their mean over the tasks or, with --sweep=per_task, for each; then 1,000 images.
      --learning_rates= and --lengths=STEPS:WARMUP,... are the settings; --task_index=I/N deals the tasks to N machines;
      --suite=package.module:name has other tasks; --config=RECIPE and --config.… change the fine-tuning. The same
      command goes on after an interruption, and writes a table with the paper's results beside.
  vit-jax predict CHECKPOINT IMAGE... [--json] [--top=3] [--raw]
      Classes of image files, of all in a folder, or of those that match a pattern. For weights without
      preprocessing: --resize=direct|short_side, --crop_fraction=; also --class_names=FILE, --compute_dtype=.
  vit-jax plot RUN... [--output=curves.png] [--axis=steps|images|exaflops|time] [--metrics=loss,accuracy,learning_rate]
      Learning curves of runs in one picture (.png, .svg, .pdf), of all in a folder too; a metric also by its own name.
  vit-jax report WORKDIR [--output=report.html] [--data_dir=FOLDER] [--without_data]
      A run as one page that opens anywhere: results, curves, mistakes and confusions, pictures of the network, cost and
      config. Its test images are evaluated for it; further --global_batch=, --max_unreadable=.
  vit-jax export CHECKPOINT --to=npz|safetensors|stablehlo [--output=PATH] [--names=timm|huggingface] [--overwrite]
      One file for other programs: weights, or a program that takes uint8 images on CPU, CUDA and TPU.
  vit-jax convert SOURCE DESTINATION [--to=released|bit|timm|huggingface|vit_jax] [--without_head] [--raw] [--overwrite]
      Read weights in any format and write them in any other; --image_size=H,W and others give what a file lacks.
  vit-jax inspect CHECKPOINT [all|WHAT,...] --output=FOLDER [--images=FOLDER|DATA] [--num_images=128] [--shown=8]
      Pictures of a network, each as .png with its numbers as .npz: filters, positions; on images also distance (mean
      attention distance and entropy of each head), rollout, heads (--heads=LAYER:HEAD,...), gradcam, similar, pca,
      reconstructions. Of DATA as in a recipe also --split=, --data_dir=.
  vit-jax plan --config=RECIPE[:ARGUMENT] --topology=v5e:16x16 [--price=N] [--json] [--hlo=FILE] [--config.…]
      Memory, time and cost of training on TPUs that you need not have (v4, v5e, v5p, v6e; 2*v5e:16x16 or --slices=2
      for two slices), from the run's own step compiled for them; --price= of one chip for one hour. GPUs (h100:8, or
      4*h100:8 for four nodes) are planned by arithmetic, with --arithmetic TPUs too. For data that the recipe does not
      name: --num_examples=, --num_classes=. --search finds the fastest layout that fits: rematerialisation, sharding
      and micro-batches, with --batches other batches too; the best --tries=4 are compiled.
  vit-jax prepare DATASET [--data_dir=FOLDER] [--manual_dir=FOLDER]
      Write a dataset of the TFDS catalogue as ArrayRecord files, once.
  vit-jax prepare folder:PATH --short_side=256 --output=FOLDER [--quality=90]
      Write a copy of an image folder, each image with this short side, that training reads several times faster.
  vit-jax show --config=RECIPE[:ARGUMENT] [--config.SECTION.FIELD=VALUE ...]
      Print every effective value of a recipe.
  vit-jax bench --config=RECIPE[:ARGUMENT] [--steps=20] [--data] [--json] [--config.SECTION.FIELD=VALUE ...]
      Time the recipe's training step, evaluation and inference on random images, saving and restoring, and with --data
      also its input, alone and with the step, and the complete loop: medians and quartiles, memory, versions.

RECIPE is a file (configs/digits.py) or the name of a recipe that is installed with the package (digits).
VIT_JAX_TRACEBACK=1 in the environment prints the traceback of an error.
configs/README.md lists the commands for the rows of the paper.
"""

_TRAINING = (training.pretrain, training.finetune)
_WEIGHTS = (weights.evaluate, weights.predict, weights.export, weights.convert)
_TRANSFER = (transfer.fewshot, transfer.probe, transfer.knn, transfer.features, vtab.vtab)
_PICTURES = (analysis.inspect, runs.plot, runs.report)
_OTHERS = (training.prepare, training.show, training.bench, planning.plan)
VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    verb.__name__: verb for verb in _TRAINING + _WEIGHTS + _TRANSFER + _PICTURES + _OTHERS
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one verb; a ValueError becomes one message and exit code 2.

    Ctrl-C and a closed output end it with the exit codes of a shell, unless the verb handles them.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files and classes may contain undecodable bytes
    try:
        try:
            _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # an error at exit could not be handled
    except KeyboardInterrupt:
        print("vit-jax: stopped", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)  # a normal exit during an import or a compilation may crash
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the output
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, FloatingPointError) as error:
        if os.environ.get("VIT_JAX_TRACEBACK"):
            raise
        fail(str(error), 2 if isinstance(error, ValueError) else 1)


def _run(words: Sequence[str]) -> None:
    if not words or words[0] in ("help", "--help", "-h") or "--help" in words:
        print(HELP, end="")
        return
    verb, *rest = words
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        fail(f"There is no verb {verb!r}.{hint} Verbs: {', '.join(VERBS)}.", 2)
    VERBS[verb](rest)
