"""numba's decorators, and where compiled code is cached. Modules import `njit` from here; this module loads numba.

numba caches code beside the sources, or in the user's cache if the source folder is read-only. Without `Seeded`, every
user of a read-only installation would compile all code again, even if its owner has compiled it, and a user without a
home directory could not cache it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numba
from llvmlite import binding
from numba.core.caching import CacheImpl, FunctionCache, UserWideCacheLocator

PACKAGE = Path(__file__).parent
TESTED = "0.68."  # numba's versions whose internals are known; others are tried at import


def _decorators() -> tuple[Any, Any, Any]:
    """Return cfunc, njit and inner, by pipelines that override numba's internals; builds take half of numba's time."""
    from numba import _dynfunc  # pyright: ignore[reportAttributeAccessIssue]  # a C extension
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    class Code(JITCodeLibrary):
        """LLVM code of one function, optimised once: when all functions that it calls have been linked to it.

        numba links and optimises each function with all that it calls, so a function at depth n of the calls n times.
        """

        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout

        def _optimize_final_module(self) -> None:
            for function in self._final_module.functions:  # names are unique only in the process that compiles them
                if not function.is_declaration and function.linkage == binding.Linkage.linkonce_odr:
                    function.linkage = binding.Linkage.internal
            passes, builder = self._codegen._module_pass_manager()
            passes.run(self._final_module, builder)

        def finalize(self) -> None:
            called: dict[Any, None] = {}

            def visit(library: Any) -> None:
                if library not in called:
                    for other in library._linking_libraries:
                        visit(other)
                    called[library] = None

            visit(self)
            self._linking_libraries = [*called][-2::-1]  # callers first: LLVM links what is referenced already
            super().finalize()

    class InnerCode(Code):
        """LLVM code that is only linked to that of its callers."""

        def finalize(self) -> None:
            self._finalized = True

    class Entry(Compiler):
        """The compiler of a function that Python calls."""

        code = Code

        def define_pipelines(self) -> Any:
            state = self.state
            state.library = self.code(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            return super().define_pipelines()

    class Inner(Entry):
        """The compiler of a function that only compiled code calls: it makes no machine code."""

        code = InnerCode

        def define_pipelines(self) -> Any:
            self.state.flags.no_compile = True
            return super().define_pipelines()

        def _compile_core(self) -> Any:
            found = super()._compile_core()
            name = found.fndesc.qualname.split(".")[-1]
            key = _dynfunc.make_function(
                found.fndesc.lookup_module(), name, name, 0, found.environment, (found.library,)
            )
            self.state.targetctx.insert_user_function(key, found.fndesc, [found.library])
            return found._replace(entry_point=key)

    return (
        partial(_numba.cfunc, pipeline_class=Entry),
        partial(_numba.njit, pipeline_class=Entry),
        partial(_numba.njit, pipeline_class=Inner, no_cpython_wrapper=True, no_cfunc_wrapper=True),
    )


def _compiles(njit: Any, inner: Any) -> bool:
    """Return whether a function that calls another compiles and runs."""

    @inner
    def double(x: Any) -> Any:
        return 2 * x

    @njit
    def more(x: Any) -> Any:
        return double(x) + 1

    return more(1) == 3


def _supported() -> tuple[Any, Any, Any]:
    """Return the decorators; numba's own, with a log message, if its internals are others than those overridden."""
    try:
        made = _decorators()
        if numba.__version__.startswith(TESTED) or _compiles(*made[1:]):
            return made
        error = "a wrong result"
    except Exception as failed:  # whatever unknown internals raise
        error = f"{type(failed).__name__}: {failed}"
    text = "numba %s has other internals than %s*, so native code takes longer to build (%s)"
    logging.getLogger("graphwright").warning(text, numba.__version__, TESTED, error)
    return _numba.cfunc, _numba.njit, _numba.njit


_numba: Any = numba  # its annotations cover few of its options
cfunc, njit, inner = _supported()
"""numba's decorators. `inner` is for a function that only other compiled functions call."""


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


def marker(name: str, function: Callable[..., Any], *sources: Path) -> Path:
    """Return the path of the file that marks code as built, for these sources, numba, Python and CPU.

    It is in the folder where numba caches `function`, a Python function.
    """
    cpu = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    facts = source_hash(*sources), numba.__version__, binding.llvm_version_info, sys.implementation.cache_tag, *cpu
    key = blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    return Path(FunctionCache(function).cache_path) / f"{name}-{key}.built"


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

__all__ = ["cfunc", "inner", "njit"]
