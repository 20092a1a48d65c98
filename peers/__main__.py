"""`python -m peers` does what `opendiloco peer` does."""

import sys

from peers.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
