"""`python -m dense_projection_det_gemm build --arch sm_90a`: compiles this package's CUDA modules."""

import sys

from cake_shared.cli import main

if __name__ == "__main__":
    sys.exit(main("dense_projection_det_gemm"))
