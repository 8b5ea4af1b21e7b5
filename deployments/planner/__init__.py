"""The planner: moves replicas to the lengths that arrive (Arlo §3.3, §4), registers adapters and tasks, has cascades
profiled, and tells gateways what replicas do that start."""
