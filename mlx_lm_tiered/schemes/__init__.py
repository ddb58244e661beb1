"""KV schemes: what a token of KV costs, which cache classes hold it, and how attention reads it.

A scheme decides by position: with ``affine:4@N`` the first N tokens of a sequence are
run over full-precision KV, which is quantized when it holds exactly N tokens; every
later token attends to quantized KV. So what a cache holds is a function of its tokens,
whatever chunks they came in, beside whatever other rows, and from whatever tier.
"""
