"""Compatible components (Gygli et al. 2021): extractors with exchangeable heads, and methods that share parts."""
