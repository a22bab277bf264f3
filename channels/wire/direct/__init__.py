"""Large arrays that stay with their producer until their consumer fetches them."""
