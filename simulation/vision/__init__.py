"""A replica of a vision service, a batch at a time."""
