"""What a site keeps on its own disk."""
