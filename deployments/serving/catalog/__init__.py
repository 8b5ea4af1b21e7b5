"""What is registered at run time, adapters and tasks: the planner's side and its followers."""
