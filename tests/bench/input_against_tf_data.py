"""Compare our input with big_vision's operations in tf.data: images/s, CPU time and memory, in one run.

    python -m tests.bench.record input --tensorflow=PATH/TO/python

That Python has tensorflow-cpu and cv2, which ours does not need.
Both read 2,000 JPEGs, written by the first run, take a random part of each (5 to
100 % of its area, as TensorFlow draws it), resize it to 224 x 224, bilinear without antialiasing,
flip half of them, and make batches of 256, still uint8. They take turns, each in a separate
process. Ours also reads a copy that `vit-jax prepare` has written.

The JPEGs are made, not photographed: parts of scikit-learn's two photographs, enlarged to the sizes
that are common in ImageNet, with noise of several wavelengths so that a file has 105 kB on average.
70 % store colours at half the resolution, 3 % are progressive, 2 % grey, and 6 % larger (1024 x 768
and 1600 x 1200).
"""

import collections
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

BATCH = 256
SIZE = 224
WARM_UP = 3
STEPS = 16
SHAPES = {  # height and width: share of the files
    (375, 500): 0.50,
    (500, 375): 0.17,
    (333, 500): 0.12,
    (500, 333): 0.05,
    (500, 500): 0.05,
    (225, 300): 0.05,
    (768, 1024): 0.04,
    (1200, 1600): 0.02,
}
# Wavelength in pixels: standard deviation, before a factor with a mean of 1
NOISE = {1: 6.0, 2: 7.0, 4: 8.0}


def enlarge(pixels, size):
    import cv2

    return cv2.resize(
        pixels,
        size,
        interpolation=cv2.INTER_CUBIC,
    )


def draw_window(rng, photo, height, width):
    """Return a random part of a photograph with this ratio of sides."""
    num_rows, num_columns = photo.shape[:2]
    scale = rng.uniform(0.45, 1.0)
    rows = int(num_rows * scale)
    columns = min(int(rows * width / height), num_columns)

    top = rng.integers(num_rows - rows + 1)
    left = rng.integers(num_columns - columns + 1)
    return photo[top : top + rows, left : left + columns]


def draw_noise(rng, height, width):
    """Return noise of several wavelengths, grey and coloured."""
    size = (width, height)
    noise = np.zeros((height, width, 3), np.float32)
    for wave, deviation in NOISE.items():
        grey = rng.normal(size=(height // wave, width // wave))
        enlarged = enlarge(grey.astype(np.float32), size)
        noise += deviation * enlarged[..., None]

    colours = rng.normal(0, 4, (height // 4, width // 4, 3))
    enlarged = enlarge(colours.astype(np.float32), size)
    return noise + enlarged


def draw_jpeg(rng, photos):
    """Return the bytes of one random JPEG."""
    import cv2

    shapes = list(SHAPES)
    shares = list(SHAPES.values())
    height, width = shapes[rng.choice(len(shapes), p=shares)]
    photo = photos[rng.integers(len(photos))]
    window = draw_window(rng, photo, height, width)
    noise = draw_noise(rng, height, width)
    strength = rng.gamma(2.0, 0.5)

    enlarged = enlarge(window, (width, height))
    image = np.clip(enlarged + strength * noise, 0, 255)
    image = image.astype(np.uint8)
    if rng.random() < 0.02:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)

    sampling = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444
    if rng.random() < 0.7:
        sampling = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420
    quality = int(rng.integers(82, 97))
    is_progressive = rng.random() < 0.03
    options = [
        cv2.IMWRITE_JPEG_QUALITY,
        quality,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
        sampling,
        cv2.IMWRITE_JPEG_PROGRESSIVE,
        int(is_progressive),
    ]
    _, file = cv2.imencode(".jpg", image, options)
    return file.tobytes()


def make(folder, count=2000):
    """Write the JPEGs, in ten classes."""
    import cv2
    import sklearn.datasets

    rng = np.random.default_rng(0)
    folder_of_photos = Path(sklearn.datasets.__file__).parent / "images"
    paths = sorted(folder_of_photos.glob("*.jpg"))
    photos = [cv2.imread(str(path)) for path in paths]

    for number in range(count):
        folder_of_class = folder / str(number % 10)
        path = folder_of_class / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_jpeg(rng, photos))


def our_batches(folder):
    from vit_jax.config.schema import InputConfig
    from vit_jax.data.pipeline import open_batches
    from vit_jax.data.sources import open_source
    from vit_jax.data.stream import TrainStream
    from vit_jax.data.transforms import TrainTransform
    from vit_jax.data.workers import choose_parallelism

    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(SIZE, SIZE),
    )
    source = open_source(
        f"folder:{folder}",
        "all",
        config,
        0,
    )
    steps = WARM_UP + STEPS
    stream = TrainStream(
        source,
        TrainTransform(config),
        BATCH,
        np.arange(BATCH),
        seed=0,
        start_step=0,
        num_steps=steps,
    )
    parallelism = choose_parallelism(batch_bytes=BATCH * SIZE * SIZE * 3)
    with open_batches(stream, parallelism) as batches:
        yield from batches


def write_tfrecord(folder, path):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for file in sorted(folder.glob("*/*.jpg")):
            content = tf.train.BytesList(value=[file.read_bytes()])
            feature = tf.train.Feature(bytes_list=content)
            features = tf.train.Features(feature={"image": feature})
            example = tf.train.Example(features=features)
            writer.write(example.SerializeToString())


def tf_batches(folder):
    import tensorflow as tf

    records = folder.with_suffix(".tfrecord")
    if not records.exists():
        write_tfrecord(folder, records)

    def transform(record):
        feature = tf.io.FixedLenFeature([], tf.string)
        example = tf.io.parse_single_example(record, {"image": feature})
        file = example["image"]
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(file),
            tf.zeros([0, 0, 4]),
            area_range=(0.05, 1.0),
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], axis=0)
        pixels = tf.image.decode_and_crop_jpeg(file, window, channels=3)
        resized = tf.image.resize(
            pixels,
            (SIZE, SIZE),
            antialias=False,
        )
        pixels = tf.cast(resized, tf.uint8)
        return tf.image.random_flip_left_right(pixels)

    dataset = tf.data.TFRecordDataset(str(records))
    dataset = dataset.repeat()
    dataset = dataset.shuffle(500)
    dataset = dataset.map(transform, num_parallel_calls=100)
    dataset = dataset.batch(BATCH, drop_remainder=True)
    dataset = dataset.prefetch(1)
    yield from dataset.as_numpy_iterator()


def measure(batches):
    """Print the figures of one process as JSON."""
    start = time.perf_counter()
    next(batches)
    first_seconds = time.perf_counter() - start
    for _ in range(WARM_UP - 1):
        next(batches)

    start = time.perf_counter()
    start_cpu = time.process_time()
    for _ in range(STEPS):
        next(batches)
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - start_cpu

    images = STEPS * BATCH
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "images_per_second": images / seconds,
        "cpu_ms_per_image": 1e3 * cpu_seconds / images,
        "first_batch_seconds": first_seconds,
        "peak_mib": usage.ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def run_child(python, folder, contender):
    """Measure one input in a separate process; return its figures."""
    command = [python, __file__, str(folder), contender]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": root,
    }
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    *_, last_line = done.stdout.splitlines()
    return json.loads(last_line)


def measure_rows(words):
    """Return the figures of each input, medians of the rounds, by its row in the table.

    `words` has the folder, the number of rounds, and the Python of an environment with TensorFlow.
    """
    if words.tensorflow is None:
        raise SystemExit("--tensorflow=PYTHON: required for the table input.")
    folder = open_jpegs(words.folder)
    runs = {
        "big_vision's operations in tf.data": (words.tensorflow, folder, "tf.data"),
        "ours": (sys.executable, folder, "ours"),
        "ours, short side 256 by `vit-jax prepare`": (
            sys.executable,
            open_prepared(folder),
            "ours",
        ),
    }
    found = collections.defaultdict(list)
    for number in range(words.rounds):
        for name, (python, images, contender) in runs.items():
            figures = run_child(python, images, contender)
            found[name].append(figures)
            print(number, name, figures, flush=True)

    tf_figures = found["big_vision's operations in tf.data"]
    return {name: take_medians(figures, tf_figures) for name, figures in found.items()}


def open_jpegs(folder):
    """Return the folder of the JPEGs below `folder`, made if it is missing."""
    jpegs = folder / "jpegs"
    if not jpegs.exists():
        make(jpegs)
    return jpegs


def open_prepared(jpegs):
    """Return the folder of copies with a short side of 256, made if it is missing."""
    prepared = jpegs.with_name(f"{jpegs.name}_256")
    if not prepared.exists():
        options = [f"folder:{jpegs}", "--short_side=256", f"--output={prepared}"]
        subprocess.run([sys.executable, "-m", "vit_jax", "prepare", *options], check=True)
    return prepared


def take_medians(figures, tf_figures):
    """Return the medians of the rounds, and of their ratios of CPU time to tf.data's."""
    medians = {}
    for key in figures[0]:
        medians[key] = statistics.median(one[key] for one in figures)

    ratios = []
    for one, other in zip(figures, tf_figures, strict=True):
        ratios.append(other["cpu_ms_per_image"] / one["cpu_ms_per_image"])
    medians["times_as_fast"] = statistics.median(ratios)
    return medians


def main():
    """Print the figures of one input, in a process of its own."""
    folder, contender = sys.argv[1:]
    open_batches = {"ours": our_batches, "tf.data": tf_batches}[contender]
    measure(open_batches(Path(folder)))


if __name__ == "__main__":
    main()
