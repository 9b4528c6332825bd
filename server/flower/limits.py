"""The size limit of a site's reply. It applies where replies are carried (sims.federation) and where they are read."""

LEAST_LIMIT = 2**28  # bytes of a reply that are always accepted
TIMES_SENT = 8  # also accepted: this many times the bytes of the largest message sent
