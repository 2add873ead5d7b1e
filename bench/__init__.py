"""Measurements of the product: each module is a command that prints a table. Not installed."""
