"""Read and write safetensors checkpoints as bytes; this package has no tensor type and does not import torch."""

from graphwright.safetensors.divided import DividedCheckpoint
from graphwright.safetensors.errors import (
    HEADER_RULES,
    INDEX_RULES,
    CheckpointChanged,
    CheckpointClosed,
    CheckpointError,
    CheckpointNotFound,
    HeaderError,
    IndexFileError,
    UnknownKey,
    UnsafeFile,
)
from graphwright.safetensors.header import BITS, Header, TensorInfo, build_header, parse_header
from graphwright.safetensors.joined import JoinedCheckpoint
from graphwright.safetensors.reader import INDEX_SUFFIX, Checkpoint, TensorFile
from graphwright.safetensors.writer import (
    Shard,
    Stored,
    TensorData,
    index_file,
    parse_size,
    plan_like,
    plan_shards,
    write_checkpoint,
    write_tensors,
)

__all__ = [
    "BITS",
    "HEADER_RULES",
    "INDEX_RULES",
    "INDEX_SUFFIX",
    "Checkpoint",
    "CheckpointChanged",
    "CheckpointClosed",
    "CheckpointError",
    "CheckpointNotFound",
    "DividedCheckpoint",
    "Header",
    "HeaderError",
    "IndexFileError",
    "JoinedCheckpoint",
    "Shard",
    "Stored",
    "TensorData",
    "TensorFile",
    "TensorInfo",
    "UnknownKey",
    "UnsafeFile",
    "build_header",
    "index_file",
    "parse_header",
    "parse_size",
    "plan_like",
    "plan_shards",
    "write_checkpoint",
    "write_tensors",
]  # fmt: skip
