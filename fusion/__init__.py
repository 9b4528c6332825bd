"""Pure mathematics on states and networks: no Flower, no Ray, no files, no global state."""
