"""Rendezvous: who takes part in the next round, and how everybody learns of it."""
