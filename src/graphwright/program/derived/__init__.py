"""Programs made from a program and kept beside it: gradients, training steps, tapes, patched activations."""
