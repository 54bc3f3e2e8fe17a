"""The VM: small float32 ops as rows of code for one compiled function, which is built once per install."""
