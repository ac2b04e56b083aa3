"""Gradient stores on disk."""
