"""Environments of others."""
