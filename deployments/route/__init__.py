"""Routes: a classifier chooses which language model or adapter answers."""
