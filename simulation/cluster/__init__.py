"""A cluster of services of all kinds, whose replicas come and go."""
