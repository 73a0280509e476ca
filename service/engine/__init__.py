"""Sequences, the scheduler that plans every cycle, and the thread that runs them."""
