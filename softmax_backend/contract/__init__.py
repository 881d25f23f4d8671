"""What the operators require of their inputs."""
