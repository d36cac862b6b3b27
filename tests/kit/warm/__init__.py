"""Interpreters that have imported torch already: workers, torchrun's agents and stores of tests start in 50 ms."""
