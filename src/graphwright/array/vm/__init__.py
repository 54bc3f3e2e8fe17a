"""The VM: small float32 ops as instructions for one compiled interpreter, which is built once per install."""
