"""Generation: the cached program, its cache, the token loop and sampling."""
