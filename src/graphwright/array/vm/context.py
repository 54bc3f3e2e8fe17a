"""The blocks of memory by which the machine is called, and by which its threads talk: cells of 8 bytes."""

from __future__ import annotations

# a context: what one call runs
HELPER = 0  # number of the helper that serves the team for ever, from 1 on; 0 to run code
CODE = 1  # address of the first row
END = 2  # behind the last
SCRATCH = 3
FINE = 4  # what is returned, the address of an object
COUNTED = 5  # 1 if references to that object are counted
FAILED = 6  # what is returned if a row found an index out of range
WHERE = 7  # address of that row, or 0
TEAM = 8  # address of the team
THREADS = 9  # to share among, this one included
GUARD = 10  # address of a number that must be that of the next cell, or nothing runs; 0 for none
SEEN = 11
RUNS = 12  # address of a count to raise, or 0
ASK = 13  # address of a C function that gives the result where this one has none, or 0
OTHERWISE = 14  # what it is asked about
CELLS = 16

# a team: helpers, and the stretch of rows that is shared now
WORD = 0  # tickets · 2³² + the next one, in one word, so that a ticket is of the stretch it was taken from
ROWS = 1  # address of the first ticket's first row
SIZE = 2  # bytes per ticket
DONE = 3  # tickets done
WRONG = 4  # address of a row that failed, or 0
ASLEEP = 5  # helpers that wait to be woken
OWNER = 6  # 1 while a thread has its rows shared
ALLOWED = 7  # helpers that may take part
SEM_WAIT, SEM_POST, YIELD = 8, 9, 10  # addresses of functions
SEMAPHORE = 12  # 4 cells
TEAM_CELLS = 16

PAYLOAD = 32
"""Where a bytes object of CPython keeps its bytes: what the machine is given is such an object, or looks so."""
