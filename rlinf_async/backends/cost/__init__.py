"""Cost models as backends: an engine and a trainer that compute nothing, and take the time that the
real ones would take. For simulations in virtual time. No torch.

Unlike the toy backend's, their number of events depends on the number of samples, not of tokens.
"""
