"""Compiling is most of what these tests do, so they ask the compiler to try less hard."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
