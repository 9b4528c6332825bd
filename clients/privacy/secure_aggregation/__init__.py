"""Secure aggregation at the site: what leaves it is masked, so that only the sum over many sites can be read.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Sec. 4 (double masking,
Fig. 4), over the integers modulo 2**64 in which the server's sums are exact.
"""
