"""Compaction: a new base with all live tensors, written from file to file; then the files before it are removed.

The base is a commit of its own with the state of the commit before it, so that a kill at any moment leaves a store that
opens: before the rename the old files count, after it the base, and what was not removed yet the next writer removes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphwright.lifecycle.identity import now
from graphwright.lifecycle.store import Store

FILES = 512
"""Number of commit files at which a store is compacted: more would make opening slow."""
SLACK = 1 << 20
"""Superseded bytes that a store may always have: the headers of small lives are larger than their tensors."""


def due(store: Store) -> bool:
    """Return whether superseded bytes exceed live bytes (and 1 MiB), or there are 512 files."""
    live = store.live_bytes
    return len(store.commits) >= FILES or store.nbytes - live > max(live, SLACK)


def compact(store: Store) -> dict[str, Any]:
    """Compact a store; return figures for the log. Pinned steps stay. Raises: FileError; then nothing changed."""
    files, before = len(store.commits), store.nbytes
    made = store.add_base(replace(store.last.record, time=now()))
    store.forget(made.number)
    return {"files": files, "bytes_before": before, "bytes_after": made.nbytes, "commit": made.number}
