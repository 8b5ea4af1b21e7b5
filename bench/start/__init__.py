"""How soon a new user gets answers, and with how much memory, beside bare Ray Serve."""
