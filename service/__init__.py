"""A server for Speculative Pipeline Decoding (arXiv 2605.30852)."""
