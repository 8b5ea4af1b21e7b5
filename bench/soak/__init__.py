"""What is left of what clients did, in every process of a cluster."""
