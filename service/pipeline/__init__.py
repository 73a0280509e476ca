"""The target, cut into stages: partition, weights, slot caches, and the graphs that run them."""
