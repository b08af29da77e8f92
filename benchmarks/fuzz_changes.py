"""How benchmarks/fuzz.py damages a valid file: its bytes, its values, or a member of its zip."""

import io
import json
import zipfile

from lap2 import ledger

NUMBERS = [0, -1, 1, 2, 255, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**400, 0.0, -0.0, 0.5, 1.0,
           5e-324, 1e-300, 1e308, -1e308, float("nan"), float("inf"), -float("inf")]  # fmt: skip
OTHERS = [None, True, False, "", "inf", "Laplace", "x" * 2000, "\x00", "\ud800", [], {}, [[]],
          "@deep@"]  # fmt: skip
PIECES = [b"\xff" * 4, b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, b"\x80", b"9" * 5000,
          b"[" * 3000, b'{"a":' * 3000, b"NaN", b"1e999", b"-1", b"\n", b'"', b"../",
          b"\xed\xa0\x80"]  # fmt: skip


def changed_bytes(rng, content):
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, to = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        to = min(to, at + rng.choice([1, 4, 100, 10**6]))
        match rng.randrange(7):
            case 0 | 1 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 2:
                del content[at:]
            case 3:
                del content[at:to]
            case 4:
                content[at:at] = content[at:to] * rng.choice([1, 2, 20])
            case 5:
                content[at:to] = rng.choice(PIECES)
            case 6:
                content[at : at + 4] = rng.randbytes(4)
    return bytes(content)


def places(value, path=()):
    """Every place in nested containers."""
    yield path
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*path, key))


def with_changed(rng, value, path, others):
    if path:
        key, *rest = path
        copied = dict(value) if isinstance(value, dict) else list(value)
        copied[key] = with_changed(rng, copied[key], rest, others)
        return tuple(copied) if isinstance(value, tuple) else copied
    if isinstance(value, dict) and value and rng.random() < 0.5:
        key = rng.choice(list(value))
        less = {name: inner for name, inner in value.items() if name != key}
        return rng.choice([less, {**value, "more": 1}, {**less, f"{key}x": value[key]}])
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice([value[:-1], value + value, value[:1] * 300, list(reversed(value))])
    if isinstance(value, str) and rng.random() < 0.3:
        return changed_bytes(rng, value.encode(errors="surrogatepass")).decode("latin-1")
    if type(value) in (int, float) and rng.random() < 0.3:
        return rng.choice([-value, value + 1, value * 2, str(value), value == 1])
    return rng.choice(others)


def changed_value(rng, value, others=(*NUMBERS, *OTHERS)):
    for _ in range(rng.choice([1, 1, 2, 3])):
        value = with_changed(rng, value, rng.choice(list(places(value))), others)
    return value


def as_json(rng, value):
    text = json.dumps(value)
    depth = rng.choice([10, 900, 100_000])
    return text.replace('"@deep@"', "[" * depth + "]" * depth).encode()


def changed_json(rng, value):
    if rng.random() < 0.3:
        return changed_bytes(rng, json.dumps(value).encode())
    return as_json(rng, changed_value(rng, value))


def changed_ledger(rng, text):
    content = json.loads(text)
    del content["sha256"]
    content = changed_value(rng, content)
    if isinstance(content, dict) and rng.random() < 0.8:
        content["sha256"] = ledger._digest(content)
    return as_json(rng, content)


def rezipped(rng, content):
    """The zip with one member changed, and a checksum that fits."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        names = old.namelist()
        pickles = [name for name in names if name.endswith("pkl")]
        one = rng.choice(pickles if pickles and rng.random() < 0.8 else names)
        for name in names:
            inside = old.read(name)
            new.writestr(name, changed_bytes(rng, inside) if name == one else inside)
    return stream.getvalue()
