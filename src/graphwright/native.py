"""numba's decorators, and where compiled code is cached. Modules import `njit` from here; this module loads numba.

numba caches code beside the sources, or in the user's cache if the source folder is read-only. Without `Seeded`, every
user of a read-only installation would compile all code again, even if its owner has compiled it, and a user without a
home directory could not cache it.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numba
from numba.core.caching import CacheImpl, UserWideCacheLocator

PACKAGE = Path(__file__).parent
cfunc: Any = numba.cfunc  # numba's annotations cover few of its options
njit: Any = numba.njit


def source_hash(*paths: Path) -> int:
    """Return a 48-bit hash, never 0, of the bytes of Python files; a folder stands for the files directly in it."""
    files = [f for path in paths for f in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    return int.from_bytes(blake2b(b"".join(f.read_bytes() for f in files), digest_size=6).digest(), "little") | 1


def cached(*sources: Path, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `njit(cache=True)`, for functions that use code of several files.

    The cache is valid until one of `sources` changes; numba itself checks only the file that defines the function.
    """

    def decorate(loop: Callable[..., Any]) -> Any:
        made = njit(cache=True, **options)(loop)
        made._cache._cache_file._source_stamp = source_hash(*sources)
        return made

    return decorate


class Seeded(UserWideCacheLocator):
    """A numba cache locator for this package: the user's cache, or a temporary folder if that cannot be written.

    The folder is first filled with the compiled files of the installation.
    """

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Seeded | None:
        """Return the locator for a function, as numba's protocol requires; None for code outside the package."""
        if not Path(py_file).is_relative_to(PACKAGE):
            return None
        self = cls(py_func, py_file)
        try:
            self.ensure_cache_path()
        except OSError:
            self._cache_path = str(_process_folder() / self.get_suitable_cache_subpath(py_file))
            self.ensure_cache_path()
        _seed(Path(py_file).parent / "__pycache__", Path(self._cache_path))
        return self


@cache
def _process_folder() -> Path:
    folder = Path(mkdtemp(prefix="graphwright-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _seed(source: Path, target: Path) -> None:
    """Copy numba's cache files from `source` to `target` where they are missing or older."""
    for pattern in ("*.nbc", "*.nbi", "*.built"):  # an index is copied after the files that it names
        for file in sorted(source.glob(pattern)):
            here = target / file.name
            if not here.exists() or here.stat().st_mtime < file.stat().st_mtime:
                part = here.with_name(f"{file.name}.{os.getpid()}.part")  # another process may be copying too
                shutil.copy2(file, part)
                part.replace(here)


config: Any = vars(numba)["config"]
if not config.CACHE_LOCATOR_CLASSES:  # keep a list that the user has set
    known = [kind.__name__ for kind in CacheImpl._locator_classes]
    known.insert(known.index("UserWideCacheLocator"), f"{__name__}.{Seeded.__name__}")
    config.CACHE_LOCATOR_CLASSES = ",".join(known)

__all__ = ["cfunc", "njit"]
