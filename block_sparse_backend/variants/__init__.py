"""Masks and variants of block-sparse attention, and the quantisation of its 8-bit path."""
