"""Projection and router GEMMs: float64 oracle, CPU backend, operators that several packages share."""
