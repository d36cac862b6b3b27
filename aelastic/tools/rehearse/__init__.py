"""`aelastic rehearse`: will a script survive?  Runs it undisturbed, then under one fault at a time.

`command` rehearses a script and prints the findings; `cases` are the faults; `judging` judges how the script continues;
`trial` is one run of it, under agents in processes of their own; `files` are those that it leaves.  Nothing else of
aelastic knows about this folder.
"""

__all__ = ["command", "trial"]
