"""Code on its way through the machine: segments of a plan, the calls they are run by, the threads that help."""
