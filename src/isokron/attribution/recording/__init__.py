"""Gradients kept while a model is trained."""
