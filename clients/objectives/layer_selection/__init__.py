"""Layer selection: which layers a site shares is learned (LASEM)."""
