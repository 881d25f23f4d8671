"""An interpreter of CDNA machine code; README.md says what it models."""
