"""Files of weights from anywhere: what is read, and what is refused without harm."""

import hashlib
import io
import json
import pickle
import struct
import zipfile

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from lap2.experiments import sources, weights

STATE = {
    "weight": torch.arange(12.0).reshape(3, 4).T,
    "half": torch.ones(3, dtype=torch.float16),
    "brain": torch.ones(2, dtype=torch.bfloat16),
    "double": torch.tensor(2.5, dtype=torch.float64),
    "count": torch.tensor(7),
    "view": torch.arange(10.0)[3:5],
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LAP2_CACHE", str(tmp_path / "cache"))


def no_source():
    raise OSError("not here")


def load(content, tmp_path, *, build=dict, sha256=None):
    path = tmp_path / "weights"
    path.write_bytes(content)
    published = weights.Published("weights", "nowhere", no_source, sha256)
    return weights.load(published, build, path)


def saved(state, **settings):
    stream = io.BytesIO()
    torch.save(state, stream, **settings)
    return stream.getvalue()


def test_what_torch_saved_is_read_without_torch(tmp_path, monkeypatch):
    monkeypatch.delattr(torch, "load")
    found = load(saved(STATE), tmp_path)
    assert list(found) == list(STATE)
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_state_of_a_module_is_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    found = load(saved(module.state_dict()), tmp_path)
    assert {n: t.tolist() for n, t in found.items()} == {
        n: t.tolist() for n, t in module.state_dict().items()
    }


def test_an_old_pickle_of_torch_is_read_only_if_its_checksum_is_known(tmp_path):
    content = saved(STATE, _use_new_zipfile_serialization=False)
    known = load(content, tmp_path, sha256=hashlib.sha256(content).hexdigest())
    assert torch.equal(known["weight"], STATE["weight"])
    with pytest.raises(sources.DataError, match="must have a known checksum"):
        load(content, tmp_path)


def rewritten(state=STATE, **changes):
    """The zip that torch writes, with members changed or left out; names with _ for a dot or /."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(state))) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            key = name.partition("/")[2].replace("/", "_").replace(".", "_")
            content = changes.pop(key, old.read(name))
            if content is not None:
                new.writestr(name, content)
    assert not changes
    return stream.getvalue()


class Described:
    """Pickled as a tensor whose sizes are whatever they are said to be."""

    def __init__(self, offset, sizes, strides, storage=("storage", torch.FloatStorage, "0", "cpu")):
        self.arguments = offset, sizes, strides, False, {}
        self.storage = storage


class Describing(pickle.Pickler):
    def persistent_id(self, value):
        return value if type(value) is tuple and value[:1] == ("storage",) else None

    def reducer_override(self, value):
        if isinstance(value, Described):
            storage = (*value.storage, 12)
            return torch._utils._rebuild_tensor_v2, (storage, *value.arguments)
        return NotImplemented


def described(*arguments, **more):
    stream = io.BytesIO()
    Describing(stream, protocol=2).dump({"weight": Described(*arguments, **more)})
    return rewritten({"weight": torch.arange(12.0)}, data_pkl=stream.getvalue())


def test_a_tensor_that_is_described_well_is_read(tmp_path):
    found = load(described(2, (2, 5), (5, 1)), tmp_path)
    assert torch.equal(found["weight"], torch.arange(12.0)[2:].reshape(2, 5))


OTHER = ("storage", torch.ComplexFloatStorage, "0", "cpu")
BAD = {
    "beyond its numbers": lambda: described(3, (2, 5), (5, 1)),
    "more than its numbers": lambda: described(0, (10**12,), (0,)),
    "a stride below 0": lambda: described(9, (3,), (-1,)),
    "a size below 0": lambda: described(0, (-1,), (1,)),
    "a size of true": lambda: described(0, (True,), (1,)),
    "no size": lambda: described(0, (0,), (1,)),
    "too few strides": lambda: described(0, (3, 4), (1,)),
    "too many sizes": lambda: described(0, (1,) * 70, (1,) * 70),
    "sizes past 64 bits": lambda: described(0, (2**70, 2**70), (2**70, 1)),
    "numbers of another kind": lambda: described(0, (3,), (1,), storage=OTHER),
    "another file": lambda: described(0, (3,), (1,), storage=(*OTHER[:1], OTHER[1], "../0", "")),
    "cut short": lambda: rewritten(data_0=b"abc"),
    "no numbers": lambda: rewritten(data_0=None),
    "no description": lambda: rewritten(data_pkl=None),
    "most byte first": lambda: rewritten(byteorder=b"big"),
    "code": lambda: rewritten(data_pkl=pickle.dumps(Runs())),
    "code in it": lambda: rewritten(data_pkl=pickle.dumps({"weight": Runs()})),
    "not a number": lambda: saved({"weight": torch.tensor([1, float("nan")])}),
    "half a zip": lambda: saved(STATE)[:700],
}


class Runs:
    def __reduce__(self):
        return pytest.fail, ("a file ran code",)


@pytest.mark.parametrize("what", BAD)
def test_what_torch_cannot_have_saved_is_refused(tmp_path, what):
    with pytest.raises(sources.DataError, match=r"weights: FormatError"):
        load(BAD[what](), tmp_path)


def graph(**changes):
    tensor = numpy_helper.from_array(torch.ones(2, 3).numpy(), "backbone.layernorm.weight")
    for name, value in changes.items():
        if name == "dims":
            del tensor.dims[:]
            tensor.dims.extend(value)
        elif name == "external":
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=value)
        else:
            setattr(tensor, name, value)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([], "g", [x], [x], [tensor]))
    return onnx.ModelProto.SerializeToString(model)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (graph(), "not a DINOv2 in ONNX: KeyError"),
        (graph(external="/etc/passwd"), "must hold numbers of a known kind, in this file"),
        (graph(dims=[-2, -3]), "must hold numbers of a known kind"),
        (graph(dims=[2**40, 2**40]), "must hold as many numbers"),
        (graph(data_type=TensorProto.STRING), "must hold numbers of a known kind"),
        (graph(raw_data=b"abc"), "must hold as many numbers"),
        (graph()[:-9], "not a DINOv2 in ONNX: DecodeError"),
        (b"\x08\x07" + b"\x3a\x80" * 3000, "not a DINOv2 in ONNX"),
    ],
)
def test_onnx_that_cannot_be_meant_is_refused(tmp_path, content, words):
    with pytest.raises(sources.DataError, match=words):
        load(content, tmp_path)


def tensors(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}},
        b'{"a": ' * 10_000,
        b"",
        b"{\xff",
    ],
)
def test_safetensors_that_cannot_be_meant_are_refused(tmp_path, header):
    with pytest.raises(sources.DataError, match="not a file of torch, ONNX or safetensors"):
        load(tensors(header), tmp_path)


def test_a_network_that_refuses_the_tensors_is_an_error_that_names_the_file(tmp_path):
    def build(state):
        return state["another"]

    with pytest.raises(sources.DataError, match=r"not the weights of this network: KeyError"):
        load(saved(STATE), tmp_path, build=build)
