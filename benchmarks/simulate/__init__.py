"""Policies over ``static``, simulated, on clusters of several sizes: ``python -m``."""
