"""Pickles are refused unread, by name and by their first bytes: loading one runs whatever code it holds."""

from __future__ import annotations

import shlex
from pathlib import Path

from graphwright.safetensors.errors import UnsafeFile

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_ZIP = b"PK\x03\x04"

_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; "
    "t = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "save_file({k: v.clone().contiguous() for k, v in t.items()}, sys.argv[2])"
)


def conversion_command(path: Path) -> str:
    """A shell line that turns a PyTorch file into safetensors, with torch's loader that runs no code."""
    target = path.with_suffix(".safetensors")
    if target == path:  # a pickle under that name: not over itself
        target = path.with_stem(f"{path.stem}-converted")
    arguments = [_CONVERT, str(path), str(target)]
    return "python -c " + " ".join(map(shlex.quote, arguments))


def refuse_by_name(path: Path) -> None:
    """Raises: UnsafeFile if the suffix is one that pickles go by."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _unsafe(path, f"a {path.suffix} file")


def refuse_by_magic(path: Path, start: bytes) -> None:
    """Raises: UnsafeFile if `start`, the first 9 bytes or more, begins a pickle or a zip archive.

    A header of 640 bytes has a length that begins like a pickle (80 02); the brace after it tells them apart.
    """
    if start[8:9] == b"{" and start[4:8] == bytes(4):
        return
    if start.startswith(_ZIP):
        raise _unsafe(path, "a zip archive, as torch.save writes")
    if start[:1] == b"\x80" and start[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        raise _unsafe(path, "a pickle")


def _unsafe(path: Path, got: str) -> UnsafeFile:
    return UnsafeFile(
        "this file may run code when it is loaded, so it is not read",
        where=path,
        expected="a safetensors file",
        got=got,
        fix=conversion_command(path),
    )
