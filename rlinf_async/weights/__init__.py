"""Weights as buckets of bytes, under one version, checked before they are used."""
