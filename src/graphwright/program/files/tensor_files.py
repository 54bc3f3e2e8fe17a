"""The tensor files of a saved program: mapped, and each tensor checked against its digest when it is first touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphwright.array import CPU, NDArray, Storage
from graphwright.array.dtype import BY_TAG
from graphwright.program.errors import ProgramFileError
from graphwright.program.files import forms
from graphwright.program.files.save import header_digest
from graphwright.program.program import Program
from graphwright.program.weights import Promise, digest_of
from graphwright.safetensors import Checkpoint


class TensorFiles:
    """The tensor files of a saved program, and arrays that map them."""

    def __init__(self, folder: Path, headers: Mapping[str, Any], p: Program) -> None:
        self.program = p
        names = [n for n in headers if n.startswith("history")]
        self.weights = Checkpoint(folder, stem="weights")
        self.history = Checkpoint(folder, stem="history") if names else None
        found = [c for c in (self.weights, self.history) if c is not None]
        files = {f.path.name: (f.path, f.payload_offset) for c in found for f in c.files}
        files |= {c.index.name: (c.index, c.index.stat().st_size) for c in found if c.index is not None}
        forms.table(files, headers)
        for name, (path, length) in files.items():
            size, digest = forms.array(headers[name], 2)
            if path.stat().st_size != size or header_digest(path, length) != digest:
                raise ProgramFileError("the file is not the one that was saved", where=path)
        self._mapped: list[NDArray] = []

    def array(self, checkpoint: Checkpoint, key: str, digest: str, reference: str | None) -> NDArray:
        """A tensor, mapped at its first use and checked against its digest then."""
        info = checkpoint.info(key)
        kind = BY_TAG.get(info.tag)
        if kind is None:
            raise forms.wrong("a dtype of this package", info.tag)

        def touch() -> memoryview:
            content = checkpoint.bytes(key)
            if digest_of(array.spec, content) != digest:
                raise ProgramFileError(
                    "the bytes of this tensor are damaged", where=f"{checkpoint.path}: {key}", expected=digest
                )
            return content

        array = NDArray(Storage.mapped(touch, info.nbytes, CPU, checkpoint.file_of(key).check_mapped), kind, info.shape)
        self.program.weights.promises[array] = Promise(digest, reference)
        self._mapped.append(array)
        return array

    def verify(self) -> None:
        """Touch all tensors. Raises: ProgramFileError."""
        for array in self._mapped:
            assert array.storage.memory is not None
