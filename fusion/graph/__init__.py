"""What is wired to what: axes of channels derived from a traced network."""
