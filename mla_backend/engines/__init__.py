"""Adapters to engines; nothing else in the package imports an engine."""
