"""One budget for all services."""
