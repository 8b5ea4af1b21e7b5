"""What one tenant does to another in a replica."""
