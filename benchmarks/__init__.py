"""Speed and memory against peers: ``python -m benchmarks.rotary``, ``python -m benchmarks.vit``."""
