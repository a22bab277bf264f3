"""``python -m rlinf_async``: the same as ``rlinf-async``."""

import sys

from rlinf_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
