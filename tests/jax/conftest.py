"""Compiling is most of what these tests do, so they ask the compiler to try less hard."""

import os

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false "
    # small programs, cut into parts to be compiled by many threads, only cost more
    "--xla_cpu_parallel_codegen_split_count=1",
)
