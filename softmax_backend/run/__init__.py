"""One pipeline per operator."""
