"""Decisions about replicas of any kind."""
