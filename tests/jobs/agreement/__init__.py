"""``check`` and the run agree: what the one passes, the other does not refuse a minute later."""
