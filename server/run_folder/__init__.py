"""The folder of a run: its content, and how it is read and written."""
