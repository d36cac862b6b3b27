"""Run events, and what is made of them: event log, metrics, log lines, systemd, torch's events."""
