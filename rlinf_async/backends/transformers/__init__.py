"""Language models of the Hugging Face library: folders that hold them, and generation."""
