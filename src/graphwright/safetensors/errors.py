"""Errors of checkpoints, all derived from `CheckpointError`, and tables of the rules that headers and indexes obey."""

from __future__ import annotations

from graphwright.errors import GraphwrightError
from graphwright.files.errors import JSON_RULES, RuleError

MAX_HEADER = 100_000_000  # bytes, as in the format's own library
MAX_TENSORS = 200_000  # in one file
MAX_NAME = 4096  # bytes of UTF-8
MAX_RANK = 32
MAX_TAG = 64  # characters

HEADER_RULES = {
    **JSON_RULES,
    "length": f"the header must be at most {MAX_HEADER} bytes and end within the file",
    "start": "the header must start with {",
    "count": f"there may be at most {MAX_TENSORS} tensors",
    "name": f"a tensor name may have at most {MAX_NAME} bytes and must not be __metadata__",
    "metadata": "__metadata__ must map strings to strings",
    "fields": "a tensor must have exactly dtype, shape and data_offsets",
    "dtype": f"a dtype must be a string of 1 to {MAX_TAG} characters",
    "shape": "a shape must be a list of integers >= 0",
    "rank": f"a shape may have at most {MAX_RANK} dimensions",
    "overflow": "the number of elements times bits per element must fit into 64 bits",
    "alignment": "a tensor with elements smaller than a byte must end on a byte boundary",
    "offsets": "data_offsets must be two integers, 0 <= begin <= end",
    "size": "end - begin must equal the size given by shape and dtype",
    "tiling": "the tensors must cover the payload without gaps, overlaps or trailing bytes",
}

INDEX_RULES = {
    **JSON_RULES,
    "weight_map": "the index must have a weight_map that maps keys to shard names",
    "shard_name": "a shard name must be a plain file name that ends in .safetensors",
    "outside": "a shard must be in the directory of its index, after its links are resolved",
    "missing": "every shard of the index must exist",
    "twice": "a key may be in one shard only",
    "absent": "a key must be in the shard that the index names",
    "unlisted": "every key of a shard must be in the index",
}


class CheckpointError(GraphwrightError):
    """Root of the errors of checkpoints."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class UnknownKey(CheckpointError, KeyError):
    """No tensor of the checkpoint has this key; `fix` lists similar keys."""


class HeaderError(RuleError, CheckpointError):
    """The header of a file breaks `rule` of `HEADER_RULES`; `key` is the tensor concerned, if any."""

    FORMAT, RULES = "header", HEADER_RULES


class IndexFileError(RuleError, CheckpointError):
    """The index of a sharded checkpoint breaks `rule` of `INDEX_RULES`; `key` is the tensor or shard concerned."""

    FORMAT, RULES = "index", INDEX_RULES


class UnsafeFile(CheckpointError):
    """Loading the file could run code from it (pickle), so it is not read; `fix` is a conversion command."""


class CheckpointChanged(CheckpointError):
    """The file changed after it was opened (size, time or inode), so its bytes are not returned."""


class CheckpointClosed(CheckpointError, ValueError):
    """The checkpoint was closed before this tensor was read."""
