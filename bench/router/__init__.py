"""What our gateway and router cost, beside bare Ray Serve."""
