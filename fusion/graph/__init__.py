"""The wiring of a network: axes of channels, derived from its trace."""
