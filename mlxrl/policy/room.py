"""How much room the caches of rows have."""

from __future__ import annotations


def capacity_for(tokens: int) -> int:
    """Tokens of room for so many: multiples of 32, from 128 on of a quarter of the power of two below."""
    grain = max(32, 2 ** (max(tokens, 1).bit_length() - 3))
    return -(-tokens // grain) * grain
