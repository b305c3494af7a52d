"""Trains a small byte-level Gated DeltaNet on real text, then proves that its bits repeat; see `--help`."""
