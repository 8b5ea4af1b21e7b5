"""A pool of text classifiers, planner and autoscaling included, as discrete events."""
