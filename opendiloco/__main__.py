"""`python -m opendiloco` does what `opendiloco` does."""

import sys

from opendiloco.cli import main

if __name__ == "__main__":
    sys.exit(main())
