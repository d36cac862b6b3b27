"""Agents, endpoints and stores that are simulated: virtual time, a network and faults that obey one seed."""
