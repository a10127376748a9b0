"""Pack the workshop for machines without network, unpack it, and try other versions of its packages."""
