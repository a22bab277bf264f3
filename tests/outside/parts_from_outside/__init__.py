"""One part of each kind."""
