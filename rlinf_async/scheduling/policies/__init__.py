"""The built-in scaling policies, one in each file."""
