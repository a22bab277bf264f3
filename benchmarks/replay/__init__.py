"""Images in a replay store, raw and compressed: ``python -m``."""
