"""Compatible components (Gygli et al. 2021): extractors whose heads can be exchanged, and the methods that share parts."""
