"""Code compiled by numba, and where it is kept. Who compiles imports numba's decorators from here; this loads numba.

numba keeps code beside the sources, or in the user's cache where it may not write there. An installation that was
built once by its owner would then be built again by everyone who runs it, and not at all by one without a home.
"""

from __future__ import annotations

import atexit
import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numba
from numba.core.caching import CacheImpl, UserWideCacheLocator

PACKAGE = Path(__file__).parent
cfunc: Any = numba.cfunc  # its annotations know few of its options
njit: Any = numba.njit


class Seeded(UserWideCacheLocator):
    """For this package's code: the user's cache, or a folder of the process, begun with what the installation has."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Seeded | None:
        """The locator of numba's protocol; None for code of others."""
        if not Path(py_file).is_relative_to(PACKAGE):
            return None
        self = cls(py_func, py_file)
        try:
            self.ensure_cache_path()
        except OSError:
            self._cache_path = str(_of_process() / self.get_suitable_cache_subpath(py_file))
            self.ensure_cache_path()
        _seed(Path(py_file).parent / "__pycache__", Path(self._cache_path))
        return self


@cache
def _of_process() -> Path:
    place = Path(mkdtemp(prefix="graphwright-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@cache
def _seed(source: Path, place: Path) -> None:
    """Copy compiled code that is not there, or older there."""
    for pattern in ("*.nbc", "*.nbi", "*.built"):  # an index names files that have to be there
        for file in sorted(source.glob(pattern)):
            here = place / file.name
            if not here.exists() or here.stat().st_mtime < file.stat().st_mtime:
                part = here.with_name(f"{file.name}.{os.getpid()}.part")  # another process may do the same
                shutil.copy2(file, part)
                part.replace(here)


config: Any = vars(numba)["config"]
if not config.CACHE_LOCATOR_CLASSES:  # the user's own list is left alone
    known = [kind.__name__ for kind in CacheImpl._locator_classes]
    known.insert(known.index("UserWideCacheLocator"), f"{__name__}.{Seeded.__name__}")
    config.CACHE_LOCATOR_CLASSES = ",".join(known)

__all__ = ["cfunc", "njit"]
