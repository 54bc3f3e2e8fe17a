"""KV caches, sampling and the token loop."""
