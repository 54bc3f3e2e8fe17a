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
    "length": f"the file ends before its header is complete, or the header is longer than {MAX_HEADER} bytes",
    "start": "the header does not start with {",
    "count": f"there are more than {MAX_TENSORS} tensors, or too many objects and lists",
    "name": f"a tensor name is longer than {MAX_NAME} bytes, or is __metadata__",
    "metadata": "__metadata__ does not map strings to strings",
    "fields": "the fields of a tensor are not exactly dtype, shape and data_offsets",
    "dtype": f"a dtype is not a string of 1 to {MAX_TAG} characters",
    "shape": "a shape is not a list of integers >= 0",
    "rank": f"a shape has more than {MAX_RANK} dimensions",
    "overflow": "the number of elements or bits of a tensor does not fit into 64 bits",
    "alignment": "a tensor with elements smaller than a byte does not end on a byte boundary",
    "offsets": "data_offsets are not two integers with 0 <= begin <= end",
    "size": "end - begin differs from the size given by shape and dtype",
    "tiling": "the tensors leave gaps, overlap, or do not end where the payload ends",
}

INDEX_RULES = {
    **JSON_RULES,
    "weight_map": "the index has no weight_map that maps keys to shard names",
    "shard_name": "a shard name is not a plain file name that ends in .safetensors",
    "outside": "a shard is not in the directory of its index, after links are resolved",
    "missing": "a shard of the index does not exist",
    "twice": "two shards have the same key",
    "absent": "a key is not in the shard that the index names",
    "unlisted": "a key of a shard is not in the index",
}


class CheckpointError(GraphwrightError):
    """Base class of errors of checkpoints; also raised itself, such as for a file that cannot be opened."""


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
