"""`aelastic rehearse`: will a script survive?  It is run undisturbed, then under one fault at a time.

`command` rehearses a script and says what was found; `cases` are the faults; `judging` holds what follows against the
script; `play` is one run of it, under agents in processes of their own; `files` are those that it leaves.  Nothing else
of aelastic knows of this folder.
"""

__all__ = ["command", "play"]
