"""Interpreters that have already imported torch: workers, torchrun's agents and stores of tests start in 50 ms."""
