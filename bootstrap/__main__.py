"""`python -m bootstrap` does what `opendiloco bootstrap` does."""

import sys

from bootstrap.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
