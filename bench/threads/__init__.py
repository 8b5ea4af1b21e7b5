"""How threads that share a pass wait for each other."""
