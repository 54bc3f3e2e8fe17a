"""Layout of the memory that the machine is called with and that its threads share, in cells of 8 bytes."""

from __future__ import annotations

# a context: the arguments of a call
HELPER = 0  # 1-based number of the helper thread that this call serves; 0 to run code
CODE = 1  # address of the first row
END = 2  # end of the last
SCRATCH = 3
FINE = 4  # address of the object to return
COUNTED = 5  # 1 if references to that object are counted
FAILED = 6  # address of the object to return if an index is out of range
WHERE = 7  # address of that row, or 0
TEAM = 8  # address of the team
THREADS = 9  # including this one
GUARD = 10  # address of a number that must equal SEEN for the code to run; 0 to run always
SEEN = 11
RUNS = 12  # address of a counter to increment, or 0
ASK = 13  # address of a C function called where GUARD or a row fails, or 0
OTHERWISE = 14  # its argument
CELLS = 16

# a team: the helper threads and the rows that are shared now
WORD = 0  # tickets·2³² + the next ticket, in one word, so that both change atomically
ROWS = 1  # address of the first ticket's first row
SIZE = 2  # bytes per ticket
DONE = 3  # tickets done
WRONG = 4  # address of a row that failed, or 0
ASLEEP = 5  # helpers that wait on the semaphore
OWNER = 6  # 1 while a thread is sharing rows
ALLOWED = 7  # number of helpers that may take tickets
SEM_WAIT, SEM_POST, YIELD = 8, 9, 10  # addresses of functions
SEMAPHORE = 12  # 4 cells
TEAM_CELLS = 16

PAYLOAD = 32
"""Offset of the data in a CPython bytes object; the machine's argument is such an object or has its layout."""
