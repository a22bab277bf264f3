"""Messages as bytes: frames, the pieces of large messages, and how they are read. Pure."""
