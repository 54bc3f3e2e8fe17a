"""Words of a pattern's table: int64 numbers and addresses, from which kernels of block-sparse attention read it.

Columns of indices are int32. The list of node n: b = head[n]; its `degree[n]` entries are items[b·BUCKET :] and, after
every BUCKET entries, those of b = next[b]. An in-list has the edges of a query block, an out-list those of a key block.
The table stays at one address while the pattern lives; its words change when an array moves or a number changes.
"""

MAGIC = 0
SIGNATURE = 0x47575042
"""The value of word MAGIC."""
ROWS, COLS = 1, 2
"""Addresses of the node slots of query blocks [planes, ROW_STRIDE] and of key blocks [planes, COL_STRIDE]."""
IN_HEAD, IN_DEGREE, IN_NEXT, IN_ITEMS = 3, 4, 5, 6
OUT_HEAD, OUT_DEGREE, OUT_NEXT, OUT_ITEMS = 7, 8, 9, 10
SRC, DST = 11, 12
"""Edge slot -> node slot of its key block, of its query block."""
INDEX = 13
"""Node slot -> number of its block."""
KIND, GATE, BITS = 14, 15, 16
"""Edge slot -> kind (uint8), slot of its gate (-1: none), its mask in POOL (-1: none)."""
POOL = 17
"""Masks, uint64 [n, block, words of a row]: bit j % 64 of word j // 64 of row i is set if query i sees key j."""
BLOCK, NQ, NK, PLANES, TQ, TK = 18, 19, 20, 21, 22, 23
QSTART, CAUSAL, WINDOW, SYMMETRIC = 24, 25, 26, 27
SEG_Q, SEG_K = 28, 29
"""Addresses of the segments of query and key tokens, int32, or 0."""
EDGES, EDGE_SLOTS = 30, 31
BUCKET = 32
ROW_STRIDE, COL_STRIDE = 33, 34
GATES = 35
"""Size of the vector of gates."""
ROOM = 36
"""Edge slots that the arrays can hold, in the table of a copy on a device; 0 in a pattern's own table."""
WORDS = 40

FULL, RULE, MASKED = 0, 1, 2
"""Kinds of edges: all pairs of the two blocks, those of the pattern's rule by position, those of the edge's mask."""
