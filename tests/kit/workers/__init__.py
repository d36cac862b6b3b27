"""What runs in workers of tests, and what it finds there."""
