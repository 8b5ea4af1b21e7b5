"""What clients notice when parts of a cluster of several nodes die or stop."""
