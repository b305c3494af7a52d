"""The conformance programs, one module per group of instruction families."""
