"""Side-by-side timing, tables and plots."""
