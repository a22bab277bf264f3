"""A backend that computes nothing: a cost model in seconds. No torch."""
