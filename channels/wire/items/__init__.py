"""Items as bytes and back, by the type of their channel. Pure."""
