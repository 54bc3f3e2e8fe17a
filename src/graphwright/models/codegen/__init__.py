"""Generated modeling code: a program as readable source, with one function per distinct block."""
