"""The tour, and the comparison of the strategies."""
