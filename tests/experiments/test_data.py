"""Data sets in tiny files of the same formats, and where files come from."""

import dataclasses
import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lap2.experiments import data


def no_source(*_):
    raise OSError("not here")


def local_only(published, arrays):
    """The data set with another checksum, and without its sources."""
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    silent = tuple((name, no_source) for name, _ in published.sources)
    return dataclasses.replace(published, sha256=digest, sources=silent)


def idx(array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.tobytes()


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LAP2_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def mnist(monkeypatch, tmp_path):
    """A folder with files of the same format, whose checksum is made the expected one."""
    rng = np.random.default_rng(0)
    shapes = [(6, 28, 28), (6,), (4, 28, 28), (4,)]
    arrays = [rng.integers(0, 10, shape).astype(np.uint8) for shape in shapes]
    folder = tmp_path / "local"
    folder.mkdir()
    for name, array in zip(data._IDX, arrays, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    monkeypatch.setattr(data, "_MNIST", local_only(data._MNIST, arrays))
    return folder


def test_a_local_folder_is_read_checked_and_cached(mnist):
    images = data.load_mnist(mnist)
    assert images.train_images.shape == (6, 1, 28, 28)
    assert images.train_images.dtype == np.float32
    assert images.train_images.max() == np.float32(9 / 255)
    assert images.test_labels.dtype == np.int64
    again = data.load_mnist()
    np.testing.assert_array_equal(again.train_images, images.train_images)


def test_corrupt_data_is_refused_and_every_source_named(mnist):
    path = mnist / f"{data._IDX[1]}.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(data.DataError) as error:
        data.load_mnist(mnist)
    for words in ("checksum", "cache", "npm package", "https://"):
        assert words in str(error.value)


def test_a_file_cut_short_is_one_more_source_that_failed(mnist):
    path = mnist / f"{data._IDX[0]}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(data.DataError, match="EOFError"):
        data.load_mnist(mnist)


@pytest.fixture
def cifar10(monkeypatch):
    """Six batches of three images, and the arrays that they are."""
    rng = np.random.default_rng(1)
    batches = [
        (rng.integers(0, 256, (3, 3, 32, 32)).astype(np.uint8), [i, (i + 1) % 10, 9])
        for i in range(6)
    ]
    arrays = [
        np.concatenate([images for images, _ in batches[:-1]]),
        np.array([label for _, labels in batches[:-1] for label in labels], np.uint8),
        batches[-1][0],
        np.array(batches[-1][1], np.uint8),
    ]
    monkeypatch.setattr(data, "_CIFAR10", local_only(data._CIFAR10, arrays))
    return batches, arrays


def write_binary(folder, batches):
    for name, (images, labels) in zip(data._BATCHES, batches, strict=True):
        rows = [bytes([k]) + image.tobytes() for k, image in zip(labels, images, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))


def write_pickles(folder, batches):
    for name, (images, labels) in zip(data._BATCHES, batches, strict=True):
        content = {b"data": images.reshape(3, -1), b"labels": labels, b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def text(content):
    """A string of Python 2."""
    return b"T" + struct.pack("<i", len(content)) + content


def write_python2(folder, batches):
    """Byte by byte as Python 2 wrote them, which Python 3 does not any more."""
    number = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    number += b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    for name, (images, labels) in zip(data._BATCHES, batches, strict=True):
        array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        array += text(b"b") + b"\x87R(K\x01K\x03M\x00\x0c\x86" + number + b"\x89"
        array += text(images.tobytes()) + b"tb"
        listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        content = b"}(" + text(b"data") + array + text(b"labels") + listed + b"u"
        (folder / name).write_bytes(b"\x80\x02" + content + b".")


def assert_are(images, arrays):
    assert images.name == "cifar10"
    np.testing.assert_array_equal(images.train_images, arrays[0] / np.float32(255))
    np.testing.assert_array_equal(images.train_labels, arrays[1])
    np.testing.assert_array_equal(images.test_images, arrays[2] / np.float32(255))
    np.testing.assert_array_equal(images.test_labels, arrays[3])
    assert images.train_images.dtype == np.float32
    assert images.train_labels.dtype == np.int64


@pytest.mark.parametrize("write", [write_binary, write_pickles, write_python2])
@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_cifar10_is_read_from_the_official_files(cifar10, tmp_path, write, inside):
    batches, arrays = cifar10
    (folder := tmp_path / "local" / inside).mkdir(parents=True)
    write(folder, batches)
    assert_are(data.load_cifar10(tmp_path / "local"), arrays)
    shutil.rmtree(tmp_path / "local")
    assert_are(data.load_cifar10(), arrays)  # from the cache


def test_cifar10_is_read_from_the_pictures_of_the_npm_package(cifar10, monkeypatch):
    batches, arrays = cifar10
    files = {
        "train_lables.json": json.dumps(arrays[1].tolist()).encode(),
        "test_lables.json": json.dumps(arrays[3].tolist()).encode(),
    }
    for name, (images, _) in zip(data._BATCHES, batches, strict=True):
        stream = io.BytesIO()
        Image.fromarray(images.transpose(0, 2, 3, 1).reshape(3, 1024, 3)).save(stream, "PNG")
        files[f"{name}.png"] = stream.getvalue()

    def from_npm(_package, names, **_checksum):
        return {name: files[name] for name in names}

    monkeypatch.setattr(data, "from_npm", from_npm)
    sources_now = (("npm", data._cifar10_from_npm),)
    published = dataclasses.replace(data._CIFAR10, sources=sources_now)
    monkeypatch.setattr(data, "_CIFAR10", published)
    assert_are(data.load_cifar10(), arrays)


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_code_does_not(cifar10, tmp_path):
    batches, _ = cifar10
    (folder := tmp_path / "local").mkdir()
    write_pickles(folder, batches)
    (folder / "data_batch_3").write_bytes(
        pickle.dumps({b"data": Runs(tmp_path / "ran"), b"labels": []})
    )
    with pytest.raises(data.DataError, match="arrays of bytes only, not"):
        data.load_cifar10(folder)
    assert not (tmp_path / "ran").exists()


def crafted_objects(_):
    """Numbers that numpy, if it were asked to make this array, would take for objects' places."""
    number = b"cnumpy\ndtype\n" + text(b"O8") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    number += b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01K\x03M\x00\x0c\x86" + number + b"\x89" + text(b"A" * 3 * 3072 * 8)
    listed = b"](K\x00K\x01K\x02e"
    return b"\x80\x02}(" + text(b"data") + array + b"tb" + text(b"labels") + listed + b"u."


def pickled(**changes):
    content = {b"data": np.zeros((3, 3072), np.uint8), b"labels": [0, 1, 2]}
    content |= {name.encode(): value for name, value in changes.items()}
    return lambda _: pickle.dumps(content, protocol=4)


HARMFUL = {
    "object pointers": (crafted_objects, "arrays of bytes only"),
    "objects": (pickled(data=np.array([object] * 3072)), "arrays of bytes only"),
    "other numbers": (pickled(data=np.zeros((3, 3072))), "arrays of bytes only"),
    "another shape": (pickled(data=np.zeros((3, 5), np.uint8)), "images of 3072 bytes"),
    "too few labels": (pickled(labels=[1]), "one for each image"),
    "a label of true": (pickled(labels=[True, 1, 2]), "labels from 0 to 9"),
    "a label of 10": (pickled(labels=[10, 1, 2]), "labels from 0 to 9"),
    "no dictionary": (lambda _: pickle.dumps([1]), "a dictionary with data"),
    "cut short": (lambda batch: batch[:-9], "a whole pickle"),
    "nested names": (lambda _: b"}" + b"(" * 10**5 + b"t" * 10**5 + b"K\x01s.", "must be texts"),
    "a great memory": (lambda _: b"Nr\xff\xff\xff\x7f.", "a dictionary with data"),
    "a great number": (lambda _: b"I" + b"9" * 5000 + b"\n.", "a whole pickle"),
    "another object": (lambda _: b"\x80\x02c__main__\nRuns\n)\x81.", "has no NEWOBJ"),
    "more than memory": (lambda _: b"\x8e" + b"\xff" * 7 + b"\x7fabc.", "a whole pickle"),
    "megabytes": (lambda batch: batch + b"N" * (64 << 20), "at most 67108864 bytes"),
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_pickle_is_only_ever_read(cifar10, tmp_path, harm):
    batches, _ = cifar10
    (folder := tmp_path / "local").mkdir()
    write_pickles(folder, batches)
    make, words = HARMFUL[harm]
    path = folder / "data_batch_3"
    path.write_bytes(make(path.read_bytes()))
    with pytest.raises(data.DataError, match=f"data_batch_3.*{words}"):
        data.load_cifar10(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"\x00\x00\x08\x01\xff\xff\xff\xff",
        b"\x00\x00\x08\x01\x7f\xff\xff\xff",
        b"\x00\x00\x08\x02\x00\x00\x00\x02\x00\x00\x00\x03",
        b"\x00\x00\x08\x03" + b"\xff" * 12,
        b"\x00\x00\x08\x03",
        b"\x00\x00\x08\xff",
        b"\x00\x00\x0b\x01\x00\x00\x00\x06",
        b"",
    ],
)
def test_idx_sizes_that_are_not_those_of_the_file_are_refused(mnist, header):
    path = mnist / f"{data._IDX[1]}.gz"
    path.write_bytes(gzip.compress(header and header + bytes(6)))
    with pytest.raises(data.DataError, match=r"train-labels-idx1-ubyte must (be an idx|hold)"):
        data.load_mnist(mnist)


def test_cifar10_names_every_place_it_looked(cifar10, tmp_path):
    with pytest.raises(data.DataError) as error:
        data.load_cifar10(tmp_path / "none")
    for words in ("data_batch_1.bin", "batches-py", "cache", "npm package", "toronto"):
        assert words in str(error.value)
