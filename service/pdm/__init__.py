"""The Pipeline Draft Module: features, network, checkpoint, and the drafter that runs it."""
