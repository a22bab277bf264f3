"""The ends of channels over a connection: credit, transfers, deliveries and their settling."""
