"""What serves every kind: the gateway's and the planner's processes, routers, metrics."""
