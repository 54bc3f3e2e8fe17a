"""Evolution of neurons and links: NEAT on populations of genomes in columns."""
