"""aelastic instead of torch's launcher, for programs that use it: accelerate, torchx, deepspeed, notebooks.

    python -m aelastic.under accelerate launch train.py     # a program, and all that it starts
    aelastic.under.replace_launcher()                       # this process: the first cell of a notebook

No file is touched.  `site/sitecustomize.py` explains the replacement.
"""

from __future__ import annotations

from aelastic.under.site.sitecustomize import replace_launcher

__all__ = ["replace_launcher"]
