"""A rank that stands still, all but one in the same place, without torch: `python phase.py CULPRIT FOLDER`."""

import os
import sys
import time
from pathlib import Path


def all_reduce() -> None:
    time.sleep(3600)


def read() -> None:
    time.sleep(3600)


RANK = int(os.environ["RANK"])
Path(sys.argv[2], str(RANK)).write_text(str(time.monotonic()))
(read if int(sys.argv[1]) == RANK else all_reduce)()
