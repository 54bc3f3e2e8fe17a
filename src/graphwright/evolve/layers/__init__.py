"""Evolution of whole layers of a Program."""
