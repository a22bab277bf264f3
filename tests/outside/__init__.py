"""A package of parts that knows of this project only what its documentation says."""
