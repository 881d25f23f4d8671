"""The ``kda-dsv4`` program."""
