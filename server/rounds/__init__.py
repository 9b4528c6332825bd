"""The rounds of a run: who is asked when, the exchange with the sites, and what methods can use in a round."""
