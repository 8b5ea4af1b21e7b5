"""Moves replicas to the lengths that arrive (Arlo §3.3, §4)."""
