"""The steps of CLA+OT: match layers, balance depths, move channels into one basis, repair statistics."""
