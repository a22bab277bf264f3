"""Messages: the plain data that crosses between workers. numpy only, no torch."""
