"""vLLM as a generation engine. The library is imported when an engine starts, and only here."""
