"""Maps from names to bytes in which ranks and nodes meet."""
