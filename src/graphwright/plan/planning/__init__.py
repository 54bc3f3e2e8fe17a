"""From a program to the tables of its plan: builder, rewrites, fusion, layout, and the loops over all of them."""
