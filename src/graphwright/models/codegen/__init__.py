"""Generated modeling code: blocks of a program as readable source."""
