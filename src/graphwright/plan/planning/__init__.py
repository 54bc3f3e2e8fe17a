"""Planning, from a program to the tables of its plan: builder, rewrites, fusion, layout, and their compiled loops."""
