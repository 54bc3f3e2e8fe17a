"""From a program to the tables of its plan: ledger, rewrites, fusion, layout, and the loops over all of them."""
