"""Plugins: objects of other packages, named by their entry points."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

_loaded: set[str] = set()


def load_plugins(group: str, enter: Callable[[Any], object] | None = None) -> None:
    """Load the entry points of a group and pass each object to `enter`; later calls for the group do nothing.

    A plugin that raises is logged by name and skipped, so that it does not break the others.
    """
    if group in _loaded:
        return
    _loaded.add(group)
    for point in entry_points(group=group):
        try:
            found = point.load()
            if enter is not None:
                enter(found)
        except Exception as error:
            logging.getLogger(__name__).warning("%s plugin %r was skipped: %s", group, point.name, error)
