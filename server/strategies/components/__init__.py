"""Methods whose sites keep networks of their own and share parts of them; how well the parts of all fit together."""
