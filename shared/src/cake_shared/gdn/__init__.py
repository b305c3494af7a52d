"""Gated DeltaNet: float64 oracle, chunked CPU backend, operators that several packages share."""
