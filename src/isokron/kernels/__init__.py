"""Fused device code behind plain functions, each module imported only where its device is used."""
