"""Drafters that are some of the target's own layers."""
