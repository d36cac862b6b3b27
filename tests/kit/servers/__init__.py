"""Real servers and schedulers for tests, and emulations of those that cannot be had."""
