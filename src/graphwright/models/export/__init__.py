"""Export: the ladder of rungs, writing, measuring, the proof in a clean process and its receipt."""
