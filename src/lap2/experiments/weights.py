"""The tensors of pretrained networks, from files of the formats they are published in.

A file whose checksum is known is what its publisher made. Any other is from anywhere: its sizes
are checked before there is memory for them, and nothing in it is called or opened.
"""

# pyright: basic

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lap2.experiments import pickles
from lap2.experiments.formats import FormatError, checked, content_of, unpacked
from lap2.experiments.pickles import Call, Name
from lap2.experiments.sources import cache_folder, first, keep

__all__ = ["Published", "State", "load"]

State = Mapping[str, Tensor]
"""The tensors of a network, by name."""

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """A file of weights, and where it can be had.

    Attributes:
        file: its name.
        source: in words, for the error if it fails.
        fetch: its content.
        sha256: of the content; None if any file of the right form will do.
        others: names that it may have in a local folder too.
    """

    file: str
    source: str
    fetch: Callable[[], bytes]
    sha256: str | None = None
    others: tuple[str, ...] = ()


def load(published: Published, build: Callable[[State], T], folder: Path | None = None) -> T:
    """What is built from the tensors of the first source that has them, unchanged.

    Args:
        published: the file.
        build: from tensors by name; a RuntimeError says that they are not the right ones.
        folder: with the file, or the file itself; looked at before any other source.

    Raises:
        DataError: no source had it.
    """
    cache = cache_folder() / "backbones" / published.file
    kept = f"cache {cache}"
    sources = [(kept, lambda: content_of(cache)), (published.source, published.fetch)]
    if folder is not None:
        names = (published.file, *published.others)
        paths = [folder] if folder.is_file() else [folder / name for name in names]
        local = [(f"file {path}", lambda path=path: content_of(path)) for path in paths]
        sources = [*local, *sources]

    def built(read: Callable[[], bytes]) -> tuple[bytes, T]:
        content = checked(read(), published.sha256, published.file)
        state = _parsed(content, known=published.sha256 is not None)
        try:
            return content, build(state)
        except (RuntimeError, ValueError, LookupError) as error:
            raise FormatError(f"not the weights of this network: {error!r:.300}") from error

    found, (content, made) = first(
        published.file, [(name, lambda read=read: built(read)) for name, read in sources]
    )
    if found == published.source:
        keep(cache, content)
    return made


def _parsed(content: bytes, *, known: bool) -> State:
    """By what the file begins with: torch's zip or pickle, ONNX's version, safetensors' length."""
    if content[:2] == b"\x80\x02":
        if not known:
            raise FormatError(
                "a pickle of torch must have a known checksum, and this file has none"
            )
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    elif content[:2] == b"PK":
        state = _from_torch(content)
    elif content[:1] == b"\x08" and content[8:9] != b"{":
        state = _dinov2(content)
    else:
        state = _from_safetensors(content)
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise FormatError(f"{name:.80} must hold finite numbers")
    return state


def _from_safetensors(content: bytes) -> State:
    from safetensors import SafetensorError  # noqa: PLC0415 - optional
    from safetensors.torch import load as from_safetensors  # noqa: PLC0415

    try:
        return from_safetensors(content)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"not a file of torch, ONNX or safetensors: {error!r:.200}") from error


_STORED = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
}
_MOST_SIZES = 8


def _from_torch(content: bytes) -> State:
    """The tensors of a zip that torch wrote, made here from their sizes and bytes alone."""
    files = unpacked(content, ["data.pkl"], maybe=["byteorder"])
    if files.get("byteorder", b"little") != b"little":
        raise FormatError("weights must be stored with the least byte first")
    described = pickles.read(files["data.pkl"], "data.pkl")
    if type(described) is not dict:
        raise FormatError("weights must be a dictionary of tensors")
    keys = {name: _key(name, value) for name, value in described.items()}
    raw = unpacked(content, set(keys.values()))
    storages = {key: bytearray(stored) for key, stored in raw.items()}
    return {name: _tensor(name, described[name], storages[key]) for name, key in keys.items()}


def _key(name: str, value: Any) -> str:
    """Which file of the zip the numbers of a tensor are in."""
    match value:
        case Call(arguments=(Call(arguments=(("storage", Name(), str(key), *_),)), *_)):
            return key
    raise FormatError(f"{name:.80} must be a tensor")


def _tensor(name: str, value: Any, stored: bytearray) -> Tensor:
    match value:
        case Call(
            function="torch._utils _rebuild_tensor_v2",
            arguments=(
                Call(arguments=((_, Name(text=kind), _, _, int(count)),)),
                int(offset),
                tuple(sizes),
                tuple(strides),
                *_,
            ),
            state=None,
        ):
            pass
        case _:
            raise FormatError(f"{name:.80} must be a tensor in the form that state_dict has")
    dtype = _STORED.get(kind.removeprefix("torch "))
    numbers = [offset, *sizes, *strides]
    if dtype is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise FormatError(f"{name:.80} must have sizes, and numbers of a known kind")
    if not (count > 0 and len(stored) == count * dtype.itemsize):
        raise FormatError(f"{name:.80} must have {count} numbers, got {len(stored)} bytes")
    # Neither beyond what is stored nor, as with a stride of zero, more than that.
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=False))
    fits = len(sizes) == len(strides) <= _MOST_SIZES and 0 not in sizes
    if not (fits and last < count and math.prod(sizes) <= count):
        raise FormatError(f"{name:.80} must have sizes that fit into {count} numbers")
    return torch.frombuffer(stored, dtype=dtype).as_strided(sizes, strides, offset)


_LAYER = {
    "norm1": "norm1",
    "attention.output.dense": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "layer_scale2.lambda1": "ls2.gamma",
}


def _dinov2(content: bytes) -> State:
    """The backbone of a DINOv2 in ONNX, with timm's names.

    torch's export keeps the names of tensors that it leaves as they are. The weights of linear
    layers are transposed and lose theirs, so they take that of the bias which is added after.
    """
    import onnx  # noqa: PLC0415 - optional
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    try:
        graph: Any = onnx.load_from_string(content).graph
        return _named(graph, {t.name: _array(t) for t in graph.initializer if t.raw_data})
    except (DecodeError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"not a DINOv2 in ONNX: {error!r:.200}") from error


def _array(tensor: Any) -> Tensor:
    """A tensor with its numbers in the file itself; another file is never opened."""
    dtype = {1: torch.float32, 6: torch.int32, 7: torch.int64}.get(tensor.data_type)
    if dtype is None or tensor.data_location or any(size < 1 for size in tensor.dims):
        raise FormatError(f"{tensor.name:.80} must hold numbers of a known kind, in this file")
    if len(tensor.raw_data) != math.prod(tensor.dims) * dtype.itemsize:
        raise FormatError(f"{tensor.name:.80} must hold as many numbers as its sizes say")
    return torch.frombuffer(bytearray(tensor.raw_data), dtype=dtype).reshape(tuple(tensor.dims))


def _named(graph: Any, arrays: dict[str, Tensor]) -> State:
    for product, bias in _biases(graph, arrays):
        arrays[bias.removesuffix("bias") + "weight"] = arrays[product].mT.contiguous()
    own = {n.removeprefix("backbone."): a for n, a in arrays.items() if n.startswith("backbone.")}
    state = {
        "cls_token": own["embeddings.cls_token"],
        "pos_embed": torch.cat(_positions(arrays), 1),
        "norm.weight": own["layernorm.weight"],
        "norm.bias": own["layernorm.bias"],
    }
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embeddings.projection.{kind}"]
    depth = 1 + max(int(name.split(".")[2]) for name in own if name.startswith("encoder.layer."))
    for i in range(depth):
        state |= _layer(own, f"encoder.layer.{i}.", f"blocks.{i}.")
    return state


def _biases(graph: Any, arrays: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The weight of every product of matrices, with the bias added to it."""
    made = {out: node for node in graph.node if node.op_type == "MatMul" for out in node.output}
    pairs: list[tuple[str, str]] = []
    for node in graph.node:
        if node.op_type != "Add":
            continue
        products = [made[name] for name in node.input if name in made]
        biases = [name for name in node.input if name in arrays]
        pairs += [(p.input[1], b) for p in products for b in biases if p.input[1] in arrays]
    return pairs


def _positions(arrays: Mapping[str, Tensor]) -> list[Tensor]:
    """The position of the class token, and those of the patches: tables without a name."""
    tables = [a for n, a in arrays.items() if n.startswith("onnx::") and a.dim() == 3]
    return sorted(tables, key=lambda table: table.shape[1])


def _layer(own: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for old, new in _LAYER.items():
        for kind in ("", ".weight", ".bias"):
            if theirs + old + kind in own:
                state[ours + new + kind] = own[theirs + old + kind]
    for kind in ("weight", "bias"):
        parts = [own[f"{theirs}attention.attention.{p}.{kind}"] for p in ("query", "key", "value")]
        state[f"{ours}attn.qkv.{kind}"] = torch.cat(parts)
    return state
