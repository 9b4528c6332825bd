"""The protocol between server and sites: messages, their encoding, checks of replies, signatures, partial sums."""
