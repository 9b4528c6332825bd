"""How much a server takes of a site's reply. What carries replies (sims.federation) and what reads them go by the same."""

LEAST_LIMIT = 2**28  # bytes of a reply that are taken in any case
TIMES_SENT = 8  # and so many times the bytes of the largest message that was sent
