"""Pack the workshop for machines without internet, unpack it, and test it with different versions of its packages."""
