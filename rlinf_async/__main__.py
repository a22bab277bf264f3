"""``python -m rlinf_async.cli``: the same as ``rlinf-async``.

``python -m rlinf_async``: the same as ``rlinf-async``.
"""

from __future__ import annotations

import sys

from rlinf_async.cli import main

if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
