"""Random calls of every operator, compared with float64; README.md says what they prove."""
