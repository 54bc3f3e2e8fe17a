"""Evolution of neurons and links: NEAT on populations whose genomes are stored in shared arrays."""
