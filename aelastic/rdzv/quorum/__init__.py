"""One register with compare-and-set that is kept in several stores, and holds while a majority of them answers.

`register` is the core, `register_events` its words, `cells` what each store keeps.
"""

__all__ = ["cells", "register", "register_events"]
