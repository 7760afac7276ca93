"""Hot operations, one folder each: checks and the public call, a torch reference twin, and faster twins.

The reference is the specification: readable beside the formulas, on any device, in plain torch. Every faster
twin has the same signature and is compared with it by a test that states its bound.
"""
