"""Services that take a prompt and have another one answer it."""
