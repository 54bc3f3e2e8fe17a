"""Atomic writing of files and directories, strict JSON, checksums. It imports only the standard library."""

from graphwright.files.appended import append_at
from graphwright.files.atomic import (
    AtomicFile,
    atomic_directory,
    atomic_write,
    check_free,
    sweep_files,
    target_path,
    writing,
)
from graphwright.files.checksums import Buffer, StrPath, blake2b_128, flat_bytes, sha256_file
from graphwright.files.errors import DestinationExists, FileError, JsonError, UnreadableFile, UnwritableTarget
from graphwright.files.locks import HeldLock
from graphwright.files.regular import open_regular, read_file
from graphwright.files.replaced import read_whole
from graphwright.files.strict_json import parse_json, read_json

__all__ = [
    "AtomicFile", "Buffer", "DestinationExists", "FileError", "HeldLock", "JsonError", "StrPath", "UnreadableFile",
    "UnwritableTarget", "append_at", "atomic_directory", "atomic_write", "blake2b_128", "check_free", "flat_bytes",
    "open_regular", "parse_json", "read_file", "read_json", "read_whole", "sha256_file", "sweep_files", "target_path",
    "writing",
]  # fmt: skip
