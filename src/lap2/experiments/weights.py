"""The tensors of pretrained networks, from files of the formats they are published in."""

# pyright: basic

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    sources = [(kept, cache.read_bytes), (published.source, published.fetch)]
    if folder is not None:
        names = (published.file, *published.others)
        paths = [folder] if folder.is_file() else [folder / name for name in names]
        sources = [*((f"file {path}", path.read_bytes) for path in paths), *sources]

    def built(read: Callable[[], bytes]) -> tuple[bytes, T]:
        content = read()
        digest = hashlib.sha256(content).hexdigest()
        if published.sha256 not in (None, digest):
            raise ValueError(f"checksum is {digest}, must be {published.sha256}")
        try:
            return content, build(_parsed(content))
        except RuntimeError as error:
            raise ValueError(f"not the weights of this network: {error}") from error

    found, (content, made) = first(
        published.file, [(name, lambda read=read: built(read)) for name, read in sources]
    )
    if found == published.source:
        keep(cache, content)
    return made


def _parsed(content: bytes) -> State:
    """By what the file begins with: torch's zip or pickle, ONNX's version, safetensors' length."""
    if content[:2] in (b"PK", b"\x80\x02"):
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    if content[:1] == b"\x08" and content[8:9] != b"{":
        return _dinov2(content)
    from safetensors import SafetensorError  # noqa: PLC0415 - optional
    from safetensors.torch import load as from_safetensors  # noqa: PLC0415

    try:
        return from_safetensors(content)
    except SafetensorError as error:
        raise ValueError(f"not a file of torch, ONNX or safetensors: {error}") from error


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
    from onnx import numpy_helper  # noqa: PLC0415

    graph: Any = onnx.load_from_string(content).graph
    arrays = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in graph.initializer}
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
