"""TurboQuant: keys in groups with a scale and a zero point, values rotated and looked up in a code book.

The format is that of vllm-metal's `attention/caches/turboquant.py` (Apache-2.0), an
engineering variant of arXiv 2504.19874, without two faults of it: groups that are
constant divide by zero there, and a zero point far from its group loses the group's
detail. Everything is computed in fp32.
"""
