"""What stands in front of gateways."""
