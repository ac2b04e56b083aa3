"""The command `isokron`: parse, call, print."""

from isokron.cli.app import main

__all__ = ["main"]
