"""`python -m cake_gdn_train_kcp build --arch sm_90a`: compiles this package's CUDA modules."""

import sys

from cake_shared.cli import main

if __name__ == "__main__":
    sys.exit(main("cake_gdn_train_kcp"))
