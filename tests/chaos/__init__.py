"""Faults in a running deployment, and what becomes of its streams."""
