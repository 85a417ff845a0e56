"""One sentence of the lectures a file, each with its experiment and its criterion."""
