"""What a kernel does with one block: hooks, each with its torch counterpart, and quantisation."""
