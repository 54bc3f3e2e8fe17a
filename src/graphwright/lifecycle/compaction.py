"""Compaction: a commit with all live tensors, after which the files before it are removed.

Clean tensors are copied from file to file. A kill at any moment leaves a store that opens: before the rename the old
files count, after it the new base, and what was not removed yet the next writer removes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphwright.lifecycle.identity import now
from graphwright.lifecycle.store import Batch, Store

FILES = 512
"""Number of commit files at which a store is compacted: more would make opening slow."""
SLACK = 8 << 20
"""Superseded bytes that a store may always have: the headers of small lives are larger than their tensors."""


def due(store: Store, batch: Batch) -> bool:
    """Return whether the store should be compacted by the next commit.

    That is so if superseded bytes would exceed live bytes (and 8 MiB) after it, or there are 512 files.
    """
    if not store.commits:
        return False
    live, added = store.live_bytes, sum(payload.nbytes for payload in batch.tensors.values())
    return len(store.commits) >= FILES or store.nbytes + added - live > max(live, SLACK)


def compact(store: Store) -> dict[str, Any]:
    """Compact a store; return figures for the log. Pinned steps stay. Raises: FileError; then nothing changed."""
    facts = {"files": len(store.commits), "bytes_before": store.nbytes}
    store.add_base(replace(store.last.record, time=now()))
    store.forget(store.last.number)
    return {**facts, "bytes_after": store.nbytes, "commit": store.last.number}
