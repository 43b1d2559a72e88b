"""Arrays in NPZ and IDX files: MedMNIST's and MNIST's layouts, and the message for each mistake."""

import gzip
import io
import pickle
import struct
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import decode
from vit_jax.data.kinds import array_files, fashion
from vit_jax.data.kinds.array_listing import Idx
from vit_jax.data.sources import find_listing, holds_out, normalize_data

SIZES = {"train": 20, "val": 6, "test": 8}
IDX = {"train": "train", "test": "t10k"}


def make_arrays(channels=(), num_labels=1, num_classes=2):
    """Return arrays with the keys and shapes of MedMNIST."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, size in SIZES.items():
        images = rng.integers(
            256,
            size=(size, 7, 5, *channels),
            dtype=np.uint8,
        )
        labels = rng.integers(
            num_classes,
            size=(size, num_labels),
            dtype=np.uint8,
        )
        labels[:, 0] = np.arange(size) % num_classes
        arrays[f"{split}_images"] = images
        arrays[f"{split}_labels"] = labels
    return arrays


@pytest.fixture
def write_npz(tmp_path):
    """Return a function that writes arrays and returns the text of the data."""

    def write(arrays, save=np.savez):
        path = tmp_path / "arrays.npz"
        save(path, **arrays)
        return f"npz:{path}"

    return write


def encode_idx(values, code=0x08):
    """Return an IDX file of an array."""
    header = struct.pack(f">HBB{values.ndim}I", 0, code, values.ndim, *values.shape)
    return header + values.tobytes()


@pytest.fixture
def write_idx(tmp_path):
    """Return a function that writes the four files of MNIST and returns the text of the data."""

    def write(arrays, compress=None):
        for split, name in IDX.items():
            images = arrays[f"{split}_images"]
            labels = arrays[f"{split}_labels"]
            write_file(f"{name}-images-idx3-ubyte", images, compress)
            write_file(f"{name}-labels-idx1-ubyte", labels[:, 0], compress)
        return f"idx:{tmp_path}"

    def write_file(name, values, compress):
        content = encode_idx(values)
        if compress is not None:
            name = f"{name}.gz"
            content = compress(content)
        (tmp_path / name).write_bytes(content)

    return write


def assert_equal_arrays(source, arrays, split):
    """Require the images and labels of a split, also after the source was sent to a worker."""
    sent = pickle.dumps(source)
    assert len(sent) < 2000, "a worker opens the file itself"
    received = pickle.loads(sent)

    images = arrays[f"{split}_images"]
    labels = arrays[f"{split}_labels"]
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        record = source[index]
        assert np.array_equal(record.image, image)
        assert np.array_equal(received[index].image, image)
        assert np.array_equal(np.ravel(record.label), label)

        if image.ndim == 2:
            image = image[..., None]
        expected = np.broadcast_to(image, (7, 5, 3))
        assert np.array_equal(decode(record.image), expected)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ("channels", "num_labels"),
    [
        ((), 1),
        ((3,), 1),
        ((1,), 14),
    ],
)
def test_the_layout_of_medmnist(
    write_npz,
    make_config,
    open_data,
    save,
    channels,
    num_labels,
):
    """Images are grey or in colour, and have one label or one for each of fourteen findings."""
    arrays = make_arrays(channels, num_labels)
    data = write_npz(arrays, save)

    for split in SIZES:
        source = open_data(data, split)
        assert source.is_multilabel == (num_labels > 1)
        assert source.num_classes == max(num_labels, 2)
        assert_equal_arrays(source, arrays, split)

    train = open_data(data, "train")
    is_mapped = isinstance(train._images, np.memmap)
    assert is_mapped == (save is np.savez)
    half = open_data(data, "train[:50%]")
    assert len(half) == 10
    assert not holds_out(data, make_config())


@pytest.mark.parametrize("compress", [None, gzip.compress])
def test_the_four_files_of_mnist(write_idx, open_data, compress):
    arrays = make_arrays()
    data = write_idx(arrays, compress)

    train = open_data(data, "train")
    test = open_data(data, "test")

    assert_equal_arrays(train, arrays, "train")
    assert_equal_arrays(test, arrays, "test")
    assert isinstance(train._images, np.memmap) == (compress is None)
    assert train.class_names == ("0", "1")
    assert train.name_of(3).endswith(
        ("train-images-idx3-ubyte[3]", "train-images-idx3-ubyte.gz[3]")
    )
    assert train.key_of(3) != test.key_of(3)


def test_names_of_classes(write_npz, write_idx, open_data, tmp_path):
    arrays = make_arrays()
    (tmp_path / "classes.txt").write_text("benign\nmalignant\n")

    named_arrays = arrays | {"class_names": ["benign", "malignant"]}

    from_idx = open_data(write_idx(arrays), "test")
    from_npz = open_data(write_npz(named_arrays), "test")

    assert from_idx.class_names == ("benign", "malignant")
    assert from_npz.class_names == ("benign", "malignant")


def test_other_names_of_arrays(write_npz, make_config, open_data):
    """Keras names splits behind x and y; without splits a part of each class is held out."""
    arrays = make_arrays()
    keras = {}
    for split in ("train", "test"):
        keras[f"x_{split}"] = arrays[f"{split}_images"]
        keras[f"y_{split}"] = arrays[f"{split}_labels"][:, 0]
    from_keras = open_data(write_npz(keras), "test")
    assert_equal_arrays(from_keras, arrays, "test")

    without_splits = {
        "images": arrays["train_images"],
        "labels": arrays["train_labels"],
    }
    data = write_npz(without_splits)
    assert holds_out(data, make_config())
    assert len(open_data(data, "all")) == 20
    assert len(open_data(data, "test")) == 2
    assert normalize_data(data) == data


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"train_labels": None}, "'train_images'", "no 'train_labels'"),
        (
            {"train_images": None, "val_images": None, "test_images": None},
            "npz:",
            "name the arrays",
        ),
        ({"train_labels": np.zeros((19, 1), np.int64)}, "train_labels", "19 labels.*20 images"),
        ({"train_labels": np.zeros((20, 1))}, "train_labels", "float64.*give integers"),
        ({"train_labels": np.zeros((20, 1, 1), int)}, "train_labels", "give integers"),
        ({"train_labels": np.arange(20) % 3 - 1}, "train_images[0]", "label -1"),
        ({"train_labels": np.full((20, 1), 2**40)}, "train_labels", "below 1,048,576"),
        ({"train_labels": np.full((20, 2), 2)}, "train_images[0]", "0 or 1"),
        ({"test_labels": np.full((8, 1), 7)}, "'test'", "classes that 'train' does not have"),
        ({"test_labels": np.ones((8, 3), int)}, "'test'", "classes that 'train' does not have"),
        ({"train_images": np.zeros((20, 4, 4))}, "train_images", "float64.*give uint8"),
        ({"train_images": np.zeros((20, 4, 4, 2), np.uint8)}, "train_images", "1, 3 or 4"),
        ({"train_images": np.zeros((20, 4), np.uint8)}, "train_images", "give uint8"),
        ({"class_names": np.arange(2)}, "class_names", "list of texts"),
        ({"class_names": ["a", "a"]}, "class_names", "repeated"),
        ({"train_images": np.array([{}] * 20)}, "arrays.npz", "Python objects"),
    ],
)
def test_arrays_that_are_rejected(
    write_npz,
    open_data,
    changes,
    field,
    rule,
):
    arrays = make_arrays() | changes
    present = {}
    for name, values in arrays.items():
        if values is not None:
            present[name] = values
    data = write_npz(present)

    with rejects(field, rule):
        source = open_data(data, "train")
        open_data(data, "test")
        source[0]


def test_a_fourth_channel_is_ignored_with_a_warning(
    write_npz,
    open_data,
    caplog,
):
    data = write_npz(make_arrays((4,)))

    open_data(data, "train")
    open_data(data, "train", channels=4)

    (message,) = caplog.messages
    assert "the fourth channel is ignored; --config.input.channels=4" in message


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_npz_files(write_npz, open_data, save):
    data = write_npz(make_arrays(), save)
    path = find_listing(data).path
    content = path.read_bytes()
    half = len(content) // 2
    quarter = len(content) // 4
    damaged = bytearray(content)
    damaged[quarter : quarter + 9] = bytes(9)

    for wrong in (b"", content[:-30], content[:half], b"\x93NUMPY"):
        path.write_bytes(wrong)
        with rejects(str(path), "cannot be read"):
            open_data(f"npz:{path}", "train")

    path.write_bytes(damaged)
    if save is np.savez_compressed:
        with rejects(str(path), "cannot be read"):
            open_data(f"npz:{path}", "train")[0]
    path.unlink()
    with rejects("no file", path.name):
        open_data(f"npz:{path}", "train")


def test_an_array_that_claims_another_size(write_npz, open_data):
    path = find_listing(write_npz({})).path
    arrays = make_arrays()
    file = io.BytesIO()
    np.save(file, arrays["train_images"])
    content = file.getvalue()
    wrong = content.replace(b"(20, 7, 5)", b"(90, 7, 5)")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_images.npy", wrong)

    with rejects("train_images", "takes 3,150 bytes, and it has 700"):
        open_data(f"npz:{path}", "train")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (lambda file: b"", "cannot be read"),
        (lambda file: file[:-1], "takes 700 bytes, and it has 699"),
        (lambda file: file + b"x", "takes 700 bytes, and it has 701"),
        (lambda file: b"\x89PNG" + file, "does not begin as an IDX file"),
        (lambda file: gzip.compress(file)[:-9], "cannot be read"),
        (lambda file: gzip.compress(file[:-1]), "700 bytes that its header states"),
        (lambda file: gzip.compress(file + b"x"), "700 bytes that its header states"),
        (lambda file: encode_idx(np.zeros((20, 7), np.uint8)), "give uint8"),
    ],
)
def test_damaged_idx_files(write_idx, open_data, content, rule):
    data = write_idx(make_arrays())
    path = find_listing(data).path / "train-images-idx3-ubyte"
    path.write_bytes(content(path.read_bytes()))

    with rejects("train-images-idx3-ubyte", rule):
        open_data(data, "train")[0]


def test_missing_idx_files(write_idx, open_data, tmp_path):
    data = write_idx(make_arrays())
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with rejects("'test'", "no file of labels"):
        open_data(data, "test")

    with rejects("nowhere", "four files"):
        open_data(f"idx:{tmp_path}/nowhere", "test")


def test_a_file_that_is_replaced_and_a_large_one(
    write_npz,
    open_data,
    monkeypatch,
):
    data = write_npz(make_arrays(), np.savez_compressed)
    source = open_data(data, "train")
    origin = source.origin
    monkeypatch.setattr(array_files, "MAX_MEMORY_BYTES", 100)
    with rejects("train_images", "because it is compressed"):
        source[0]

    write_npz(make_arrays())
    with rejects("train_images", "has changed"):
        source[0]
    assert open_data(data, "train").origin != origin


# Fashion-MNIST, with small files in the place of the real ones.


@pytest.fixture
def small_fashion(write_idx, monkeypatch, tmp_path):
    """A folder with four small files, whose digests are known; no other folder exists."""
    write_idx(make_arrays(num_classes=10), gzip.compress)
    digests = {}
    for path in tmp_path.glob("*.gz"):
        content = gzip.decompress(path.read_bytes())
        digests[path.stem] = fashion.hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(fashion, "DIGESTS", digests)
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fashion._require_digest.cache_clear()
    return tmp_path


def test_fashion_is_read_from_a_folder(
    small_fashion,
    open_data,
    monkeypatch,
):
    folder = str(small_fashion)
    source = open_data("fashion", "test", data_dir=folder)
    assert source.class_names == fashion.CLASS_NAMES
    assert len(source) == SIZES["test"]
    half = open_data("fashion", "train[:50%]", data_dir=folder)
    assert len(half) == 10

    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", small_fashion)
    of_debian = open_data("fashion", "test")
    assert of_debian[0].label == source[0].label

    with rejects("'val'", "'train' and 'test'"):
        open_data("fashion", "val")
    with rejects("data_dir=gs://b", "folder of this machine"):
        open_data("fashion", "test", data_dir="gs://b")


def test_fashion_with_another_content(small_fashion, open_data):
    path = small_fashion / "t10k-labels-idx1-ubyte.gz"
    labels = encode_idx(np.zeros(8, np.uint8))
    path.write_bytes(gzip.compress(labels))

    with rejects(str(path), "not the file of Fashion-MNIST"):
        open_data("fashion", "test", data_dir=str(small_fashion))


def test_fashion_is_downloaded_and_compared(
    small_fashion,
    open_data,
    monkeypatch,
):
    """A file with another digest is not kept; without an answer the message names other ways."""
    wrong = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = (small_fashion / self.path[1:]).read_bytes()
            if self.path in wrong:
                content = gzip.compress(b"another file")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words):
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(fashion, "URL", f"http://127.0.0.1:{server.server_port}")
        wrong.add("/t10k-labels-idx1-ubyte.gz")
        with rejects("t10k-labels", "has the SHA-256"):
            open_data("fashion", "test")
        wrong.clear()
        test = open_data("fashion", "test")
        assert len(test) == SIZES["test"]
        server.shutdown()

    train = open_data("fashion", "train")
    assert len(train) == SIZES["train"], "from the user's cache"
    (small_fashion / "cache/vit_jax/fashion-mnist/train-labels-idx1-ubyte.gz").unlink()
    with rejects("train-labels", "cannot be downloaded.*dataset-fashion-mnist.*data_dir"):
        open_data("fashion", "train")


@pytest.mark.skipif(
    not Idx(fashion.DEBIAN_FOLDER).exists(), reason="needs Debian's package dataset-fashion-mnist"
)
def test_the_files_of_debian(open_data):
    source = open_data("fashion", "test")
    first = source[0]

    assert first.image.shape == (28, 28)
    assert source.class_names[first.label] == "Ankle boot"
    images_of_class = np.bincount(source.labels)
    assert images_of_class.tolist() == [1000] * 10
