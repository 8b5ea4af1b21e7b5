"""Routes: whether a classifier finds the adapter that has read about a question, and what that costs."""
