"""`python -m aelastic.timeline`."""

import sys

from aelastic.timeline.command import main

if __name__ == "__main__":
    sys.exit(main())
