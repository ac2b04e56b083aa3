"""Who owns which block, and how blocks travel."""

from isokron.distributed.ranks import Ranks

__all__ = ["Ranks"]
