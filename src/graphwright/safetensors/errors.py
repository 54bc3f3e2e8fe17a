"""What can be wrong with a checkpoint. All derive from `CheckpointError`; the rules behind each are listed as data."""

from __future__ import annotations

from typing import Unpack

from graphwright.errors import Facts, GraphwrightError
from graphwright.files.errors import JSON_RULES, shorten

MAX_HEADER = 100_000_000  # bytes, as in the format's own library
MAX_TENSORS = 200_000  # in one file
MAX_NAME = 4096  # bytes of UTF-8
MAX_RANK = 32
MAX_TAG = 64  # characters

HEADER_RULES = {
    **JSON_RULES,
    "length": f"the header is at most {MAX_HEADER} bytes long and ends within the file",
    "start": "the header starts with {",
    "count": f"there are at most {MAX_TENSORS} tensors",
    "name": f"a name is at most {MAX_NAME} bytes long, and __metadata__ is no tensor",
    "metadata": "__metadata__ maps strings to strings",
    "fields": "a tensor has dtype, shape and data_offsets, and nothing else",
    "dtype": f"a dtype is a string of 1 to {MAX_TAG} characters",
    "shape": "a shape is a list of integers from 0 up",
    "rank": f"a shape has at most {MAX_RANK} dimensions",
    "overflow": "elements x bits per element fit into 64 bits",
    "alignment": "a tensor of elements smaller than a byte ends on a byte",
    "offsets": "data_offsets are two integers, 0 <= begin <= end",
    "size": "end - begin is the size that shape and dtype give",
    "tiling": "the tensors cover the payload without gap, overlap or tail",
}

INDEX_RULES = {
    **JSON_RULES,
    "weight_map": "the index has a weight_map that maps keys to shard names",
    "shard_name": "a shard is named by a plain file name that ends in .safetensors",
    "outside": "a shard lies in the directory of its index, also after its links are followed",
    "missing": "each shard of the index is there",
    "twice": "a key is in one shard only",
    "absent": "a key is in the shard that the index names",
    "unlisted": "each key of a shard is in the index",
}


class CheckpointError(GraphwrightError):
    """Root of what can be wrong with a checkpoint."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class UnknownKey(CheckpointError, KeyError):
    """No tensor of the checkpoint has this key; `fix` shows the nearest ones."""


class HeaderError(CheckpointError, ValueError):
    """The header of a file breaks a rule of `HEADER_RULES`: `rule` names it, `key` the tensor, if it is about one."""

    def __init__(self, rule: str, key: str | None = None, **facts: Unpack[Facts]) -> None:
        super().__init__(_broken("header", rule, key, HEADER_RULES), **facts)
        self.rule, self.key = rule, key


class IndexFileError(CheckpointError, ValueError):
    """The index of a sharded checkpoint breaks a rule of `INDEX_RULES`: `rule` names it, `key` the tensor or shard."""

    def __init__(self, rule: str, key: str | None = None, **facts: Unpack[Facts]) -> None:
        super().__init__(_broken("index", rule, key, INDEX_RULES), **facts)
        self.rule, self.key = rule, key


class UnsafeFile(CheckpointError):
    """A file whose loading may run code from it (pickle). It is refused unread; `fix` is the conversion command."""


class CheckpointChanged(CheckpointError):
    """The file is no longer the one that was opened (size, time, inode); its bytes are not handed out."""


class CheckpointClosed(CheckpointError, ValueError):
    """The checkpoint was closed before this tensor was asked for."""


def _broken(what: str, rule: str, key: str | None, rules: dict[str, str]) -> str:
    return f"{what} rule '{rule}' is broken{'' if key is None else f' at {shorten(key)}'}: {rules[rule]}"
