"""The steps of CLA+OT: which layers correspond, one depth, one basis, statistics set right."""
