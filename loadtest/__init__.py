"""Load tests of a running server, and their reports. README.md says how to read them."""
