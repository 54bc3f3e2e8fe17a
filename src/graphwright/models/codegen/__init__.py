"""Generated modeling code (rung 5): blocks of a program as readable source."""
