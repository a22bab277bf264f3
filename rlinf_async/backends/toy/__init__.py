"""A backend that computes nothing: its time passes on the event loop's clock. No torch."""
