"""A connection between two processes: who may speak, what is asked, and sockets that break."""
