"""Programs that are derived from a program: gradients, training steps, autograd tapes, copies with patched values."""
