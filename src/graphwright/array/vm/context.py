"""The block of memory by which the machine is called: cells of 8 bytes, each under its name.

A context with SHARED set is run by several threads at once: each takes the next ticket, which names a stretch of rows,
until there are none.
"""

from __future__ import annotations

SHARED = 0  # 1 for a context of several threads
CODE = 1  # address of the first row
END = 2  # behind the last; where threads share, bytes per ticket
SCRATCH = 3  # of this thread; where threads share, of the first
FINE = 4  # what is returned, the address of an object
COUNTED = 5  # 1 if references to that object are counted
FAILED = 6  # what is returned if a row found an index out of range
WHERE = 7  # address of that row, or 0
TICKETS = 8  # how many there are
NEXT = 9  # the next one
ARRIVED = 10  # threads that came
TEAM = 11  # address of the block that names the context of the threads
PARALLEL = 12  # address of GOMP_parallel, 0 without
THREADS = 13  # to share among
MACHINE = 14  # address of the machine
CELLS = 16

PAYLOAD = 32
"""Where a bytes object of CPython keeps its bytes: what the machine is given is such an object, or looks so."""
