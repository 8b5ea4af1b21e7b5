"""Serving: Ray Serve deployments and the Ray-free engines that they wrap."""
