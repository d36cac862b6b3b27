"""A job's secret: the file that holds it, the keys made of it, and what is proved with them.

`secret_file` reads and judges the file; `keys` makes a job's keys of its lines; with these `handshake` proves both
ends of a connection and its frames, and `seals` what is written in the cell.  The secret itself is kept nowhere.
"""

__all__ = ["handshake", "keys", "seals", "secret_file"]
