"""What a plan runs in: memory, bound calls, capture, threads, and what may be put in a segment's place."""
