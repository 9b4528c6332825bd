"""A site's files on its own disk."""
