"""How long idle threads of kernels keep their core: some microseconds, in any order of imports.

By default a thread of GNU OpenMP looks for work for milliseconds before it sleeps, on a core that another process, or a
thread of the VM, is waiting for: beside one busy core a kernel takes twenty times as long. libgomp reads its settings
when torch loads it. Later, it looks 300 times more briefly while it has more threads than there are cores. An idle team
of one thread per core, kept for the life of the process, is enough for that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from threading import Event, Thread

_SPINS = "1000"  # some 15 us; also what libgomp has for more threads than cores


@cache
def wait_briefly() -> None:
    """Make idle threads of kernels sleep soon, unless the user has set it (GOMP_SPINCOUNT or OMP_WAIT_POLICY).

    Nothing changes if torch is loaded and has another OpenMP library than GNU's.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return
    if "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = _SPINS
        return
    library = ctypes.CDLL(sys.modules["torch"]._C.__file__)  # names are also looked up in the libraries that it needs
    if hasattr(library, "GOMP_parallel") and not hasattr(library, "kmp_set_blocktime"):  # the second is LLVM's
        _keep_team(library)


def _keep_team(library: ctypes.CDLL) -> None:
    ready = Event()

    def keep() -> None:
        cores = max(library.omp_get_num_procs(), library.omp_get_max_threads())
        nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, cores + 1, 0)  # this thread is one of the team
        ready.set()
        Event().wait()  # the team ends with this thread

    Thread(target=keep, name="graphwright-waiting", daemon=True).start()
    ready.wait()
