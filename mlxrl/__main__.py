"""`python -m mlxrl` is the command `mlxrl`."""

import sys

from mlxrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
