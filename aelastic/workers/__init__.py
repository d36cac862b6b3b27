"""Processes of this machine: how they are started, bound to CPUs and cleaned up after."""
