"""The header of a GGUF file: metadata, and the names, shapes, types and places of its tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrl.policy.model_folder import ModelError

_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
TYPES = dict(enumerate(_TYPES.split()))  # of tensors, by GGML's numbers
BYTES = {"F32": 128, "F16": 64, "Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of 32 entries
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# By GGUF's number of a metadata type its code in `struct`; 8 is a string, 9 an array.
TOO_SHORT = "the file ends too early; it is incomplete, download it again"
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes a file's tensors: metadata, and by each tensor's name its shape in MLX's order and its type."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]

    def __getitem__(self, key: str) -> Any:
        if key not in self.metadata:
            raise ModelError(str(self.path), f"metadata key {key!r} is missing; convert the model again")
        return self.metadata[key]

    def check(self, met: bool, key: str, wanted: object, got: object, advice: str = "convert the model again") -> None:
        if not met:
            raise ModelError(str(self.path), key, f"wanted {wanted}, got {got}; {advice}")


def header(path: Path) -> Header:
    """A file's header; ModelError where there is no such file, or it is damaged or has tensors that are not read."""
    if not path.is_file():
        raise ModelError(str(path), "no such file; wanted a GGUF file")
    found, places = Header(path, {}, {}), dict[str, int]()
    with path.open("rb") as file:
        magic = file.read(4)
        found.check(magic == b"GGUF", "first bytes", b"GGUF", magic, "this is not a GGUF file")
        try:
            version, n_tensors, n_keys = _numbers(file, "IQQ")
            found.check(version in (2, 3), "GGUF version", "2 or 3", version)
            for _ in range(n_keys):
                key = _string(file)
                found.metadata[key] = _value(found, file, *_numbers(file, "I"))
            for _ in range(n_tensors):
                name, (dimensions,) = _string(file), _numbers(file, "I")
                *shape, number, places[name] = _numbers(file, f"{dimensions}QIQ")
                found.tensors[name] = tuple(shape[::-1]), TYPES.get(number, f"number {number}")
            start = file.tell()
        except struct.error:
            raise ModelError(str(path), TOO_SHORT) from None
        except RecursionError:
            raise ModelError(str(path), "metadata of arrays in arrays; the file is damaged") from None
    for name, (_, kind) in found.tensors.items():
        if kind not in ("F32", "F16", *BITS):
            wanted = f"wanted one of F32, F16, {', '.join(BITS)}; convert the file to one of these"
            raise ModelError(str(path), name, f"tensor type {kind} is not supported; {wanted}")
    _check_places(found, places, start)
    return found


def _check_places(header: Header, places: dict[str, int], after: int) -> None:
    """ModelError for tensors that begin at no multiple of the alignment, before the one in front of them ends, or that
    end after the file. Their places are counted from the first multiple that is not before `after`."""
    alignment = header.metadata.get("general.alignment", 32)
    header.check(isinstance(alignment, int) and alignment > 0, "general.alignment", "a whole number above 0", alignment)
    end = 0
    for name in sorted(places, key=lambda name: places[name]):
        shape, kind = header.tensors[name]
        start, right = places[name], places[name] >= end and places[name] % alignment == 0
        header.check(right, name, f"a place from {end} on, by {alignment} bytes", start, "the file is damaged")
        end = start + math.prod(shape) * BYTES[kind] // 32
    if -(-after // alignment) * alignment + end > header.path.stat().st_size:
        raise ModelError(str(header.path), TOO_SHORT)


def _numbers(file: BinaryIO, codes: str) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{codes}")
    return struct.unpack(f"<{codes}", file.read(size if size < 2**31 else 0))


def _string(file: BinaryIO) -> str:
    return _numbers(file, f"{_numbers(file, 'Q')[0]}s")[0].decode("utf-8", errors="replace")


def _value(header: Header, file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        inner, length = *_numbers(file, "I"), *_numbers(file, "Q")
        return [_value(header, file, inner) for _ in range(length)]
    if kind not in SCALARS:
        raise ModelError(str(header.path), f"metadata of unknown type {kind}; the file is damaged")
    return _numbers(file, SCALARS[kind])[0]
