"""The gated delta rule on CUDA, for every package that has its programs."""
