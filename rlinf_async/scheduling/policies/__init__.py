"""The built-in scaling policies."""
