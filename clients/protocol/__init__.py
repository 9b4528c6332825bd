"""What server and sites exchange: messages, their bytes, checks of replies, signatures, partial sums."""
