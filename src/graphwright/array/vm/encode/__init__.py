"""From an op on arrays to rows of the VM's code: the `vm` cells of `ops/`, and what splits and fuses them."""
