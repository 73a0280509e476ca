"""What the parts of the server take on this machine."""
