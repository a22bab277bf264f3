"""Another strategy while the run goes on: one transaction for every backend."""
