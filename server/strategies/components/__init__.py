"""Methods whose sites have their own networks and share parts of them, and how well all parts fit together."""
